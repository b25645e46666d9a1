"""The verbs a network is written in. An emitter turns them into the ops of one runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Ops(Protocol[T]):
    """One graph under construction; T is the runtime's own tensor handle and opaque to the networks.

    Tensors are packed rows [rows, channels]; `heads` says how many equal heads the channels hold, head after head.
    A name such as "model.layers.0.self_attn.q_proj" stands for the checkpoint's `<name>.weight` and, where the
    checkpoint has it, `<name>.bias`. Caches, block tables, windows and masks belong to the emitter alone.
    """

    def embed(self, ids: T, name: str) -> T:
        """Rows of the table: ids i32 [rows] -> [rows, channels]."""

    def linear(self, rows: T, name: str) -> T:
        """rows @ weight.T (+ bias), weight [out, in] -> [rows, out]."""

    def linears(self, rows: T, names: Sequence[str]) -> list[T]:
        """The same rows through several projections, which an emitter may compute as one."""

    def rms_norm(self, rows: T, name: str, eps: float, heads: int = 1) -> T:
        """Root-mean-square norm of each head by itself (heads = 1: of the whole row), times the weight."""

    def rope(self, rows: T, positions: T, heads: int) -> T:
        """Rotate the two halves of every head by the angles of each row's position, i32 [rows]."""

    def attend(self, query: T, key: T, value: T, layer: int) -> T:
        """Write key and value into the layer's cache, then attend causally over each row's own request.

        query [K, heads * head_dim], key and value [K, kv_heads * head_dim] -> [K, heads * head_dim].
        """

    def swiglu(self, gate: T, up: T) -> T:
        """silu(gate) * up."""

    def add(self, left: T, right: T) -> T:
        """Elementwise sum."""

    def concat(self, parts: Sequence[T]) -> T:
        """Along the channels."""

    def gather(self, rows: T, indices: T) -> T:
        """Rows by index: indices i32 [n] -> [n, ...]. n may be 0."""

    def argmax(self, logits: T) -> tuple[T, T]:
        """Index (i32 [rows]) and value (f32 [rows]) of each row's largest logit."""

    def peak_probability(self, logits: T, peak: T) -> T:
        """Softmax probability of each row's largest logit, whose value is `peak`: 1 / sum(exp(logits - peak))."""

    def margin(self, logits: T, peak: T, probability: T) -> T | None:
        """By how much the probability of the largest logit exceeds that of the next one: f32 [rows].

        None where drafts are ranked on the device, which does not read it.
        """


class BlockOps(Ops[T], Protocol[T]):
    """What a block drafter needs besides: rows of new context and rows of a block, request by request."""

    def merge(self, context: T, block: T) -> T:
        """New context [C, channels] and blocks [N, channels] as one, in the emitter's order: [M, channels]."""

    def attend_block(self, query: T, key: T, value: T, layer: int, *, causal: bool) -> T:
        """Write the merged rows' key and value [M, ...] into the cache, then attend from the block rows.

        query [N, heads * head_dim] -> the same shape. Every block row sees its request's whole context, and of its
        block either the rows up to itself (causal) or all.
        """
