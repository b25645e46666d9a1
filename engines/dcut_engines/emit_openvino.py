"""Networks as OpenVINO graphs with paged attention: the CPU default (inputs and outputs: docs/graphs.md)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import Output
from openvino import opset15 as op
from openvino._pyopenvino.op import _PagedAttentionExtension

from dcut_engines.model_config import DecoderConfig, DrafterConfig, Precision, Weights
from dcut_engines.networks.decoder import decoder
from dcut_engines.networks.dflash import EMBEDDING, HEAD, drafter
from dcut_engines.networks.rope import rope_tables

BLOCK_SIZE = 32  # tokens per KV block, fixed by OpenVINO's CPU attention

Shape = Sequence[int]
TensorNames = dict[str, list[str]]
Caches = tuple[Output, Output]  # key, value


def emit_target(
    config: DecoderConfig,
    weights: Weights,
    feature_layers: tuple[int, ...],
    precision: Precision,
    max_positions: int,
    path: Path,
) -> TensorNames:
    """Write the target to `path` (.xml, with its .bin beside it); returns its input and output names."""
    graph = PagedGraph(config, weights, precision, max_positions)
    outputs = decoder(
        graph,
        config,
        feature_layers,
        token_ids=graph.rows("token_ids"),
        positions=graph.rows("positions"),
        head_rows=graph.rows("head_rows"),
        logit_rows=graph.rows("logit_rows"),
    )
    named = {"argmax": outputs.argmax, "logits": outputs.logits}
    if outputs.features is not None:
        named["features"] = graph.leave(outputs.features)
    return graph.save(named, path)


def emit_drafter(
    config: DrafterConfig,
    weights: Weights,
    embedding: NDArray[np.float32],
    head: NDArray[np.float32],
    draft_vocab: NDArray[np.int32] | None,
    precision: Precision,
    max_positions: int,
    path: Path,
) -> TensorNames:
    """Write the drafter as emit_target writes the target.

    embedding [V, hidden] and head [V', hidden] are the target's; draft_vocab [V'] names the head's rows when it is a
    subset. One array passed as both is stored once.
    """
    tables = {f"{EMBEDDING}.weight": embedding, f"{HEAD}.weight": head}
    graph = BlockGraph(config, {**weights, **tables}, precision, max_positions)
    positions = graph.rows("positions")
    outputs = drafter(
        graph,
        config,
        features=graph.parameter("features", [-1, weights["fc.weight"].shape[1]], ov.Type.f32),
        block_ids=graph.rows("block_ids"),
        positions=positions,
        block_positions=graph.gather(positions, graph.block_rows),
        draft_rows=graph.rows("draft_rows"),
        draft_vocab=None if draft_vocab is None else constant(draft_vocab.astype(np.int32)),
    )
    named = {"tokens": outputs.tokens, "confidence": outputs.confidence}
    if outputs.margin is not None:
        named["margin"] = outputs.margin
    return graph.save(named, path)


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where the cached rows of each subsequence are; the inputs of paged attention that are the same in all layers."""

    past_lens: Output
    subsequence_begins: Output
    block_indices: Output
    block_indices_begins: Output
    max_context_len: Output


def paged_attention(
    query: Output, key: Output, value: Output, caches: Caches, pages: PageTable, scale: float
) -> Output:
    """Write key and value behind the past of their subsequence, then attend causally over that subsequence.

    The op is private to OpenVINO and takes 28 inputs; those we do not use (sliding window, ALiBi, score aggregation,
    cache rotation, sparse attention, sinks, cache eviction, query-to-query bias) are empty or zero. It also wants head
    counts and sizes that a saved file cannot hold: whoever reads it takes them from the caches' shapes.
    """
    zero, none, no_floats = (constant(np.zeros(shape, kind)) for shape, kind in (((), "i4"), (0, "i4"), (0, "f4")))
    sinks, biases = constant(np.zeros((0, 0, 0, 0), np.float32)), constant(np.zeros(0, np.uint8))
    inputs = [
        *(query, key, value, *caches),
        *(pages.past_lens, pages.subsequence_begins, pages.block_indices, pages.block_indices_begins),
        *(constant(np.float32(scale)), zero, no_floats, pages.max_context_len),
        *(none, none, none, no_floats, no_floats, zero, zero, sinks, zero, none, none, none, none, biases, none),
    ]
    return _PagedAttentionExtension(inputs).output(0)


class PagedGraph:
    """networks.Ops over OpenVINO: packed ragged rows, K/V in blocks that all requests share."""

    def __init__(
        self, config: DecoderConfig | DrafterConfig, weights: Weights, precision: Precision, max_positions: int
    ) -> None:
        self.weights = weights
        self.stored_as = np.float32 if precision == "fp32" else np.float16
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        self.parameters: dict[str, Output] = {}
        self.constants: dict[str, Output] = {}
        self.angles: dict[Output, list[Output]] = {}
        self.grouped: dict[Output, tuple[Output, Output]] = {}
        tables = rope_tables(config.rope, config.head_dim, max_positions)
        self.rope_tables = [constant(np.concatenate([table, table], axis=1)) for table in tables]
        self.pages = self.page_table()

    def parameter(self, name: str, shape: Shape, kind: ov.Type) -> Output:
        node = op.parameter(ov.PartialShape(list(shape)), kind, name)
        node.output(0).get_tensor().set_names({name})
        self.parameters[name] = node.output(0)
        return node.output(0)

    def rows(self, name: str) -> Output:
        return self.parameter(name, [-1], ov.Type.i32)

    def page_table(self, prefix: str = "") -> PageTable:
        return PageTable(
            past_lens=self.rows(f"{prefix}past_lens"),
            subsequence_begins=self.rows(f"{prefix}subsequence_begins"),
            block_indices=self.rows(f"{prefix}block_indices"),
            block_indices_begins=self.rows(f"{prefix}block_indices_begins"),
            max_context_len=self.parameter(f"{prefix}max_context_len", [], ov.Type.i32),
        )

    def leave(self, rows: Output) -> Output:
        """The same rows, fit to leave a bf16 graph.

        OpenVINO keeps in f32 whatever stands between an output and the products before it. Without a product of its
        own, a feature output would so widen the residual stream of all layers: about 1 ms per call on SmolLM2.
        """
        if self.stored_as == np.float32:
            return rows
        channels = rows.get_partial_shape()[1].get_length()
        group = math.gcd(channels, 32)
        identity = to_f32(constant(np.eye(group, dtype=self.stored_as)))
        return reshape(op.matmul(reshape(rows, [-1, group]), identity, False, True), [-1, channels])

    def save(self, outputs: Mapping[str, Output], path: Path) -> TensorNames:
        results = [op.result(output) for output in outputs.values()]
        for result, name in zip(results, outputs, strict=True):
            result.output(0).get_tensor().set_names({name})
        model = ov.Model(results, [output.get_node() for output in self.parameters.values()], path.stem)
        ov.save_model(model, path, compress_to_fp16=False)
        return {"inputs": list(self.parameters), "outputs": list(outputs)}

    def weight(self, name: str) -> Output:
        """A matrix as it is stored; a tied embedding and head are one constant."""
        if name not in self.constants:
            self.constants[name] = constant(self.weights[name].astype(self.stored_as))
        return self.constants[name]

    def embed(self, ids: Output, name: str) -> Output:
        return to_f32(self.gather(self.weight(f"{name}.weight"), ids))

    def linear(self, rows: Output, name: str) -> Output:
        return self.affine(rows, self.weight(f"{name}.weight"), [name])

    def linears(self, rows: Output, names: Sequence[str]) -> list[Output]:
        """As one product: at a few rows, each product costs as much to start as to do."""
        matrices = [self.weights[f"{name}.weight"] for name in names]
        stacked = constant(np.concatenate(matrices).astype(self.stored_as))
        widths = constant(np.array([len(matrix) for matrix in matrices], np.int64))
        parts = op.variadic_split(self.affine(rows, stacked, names), constant(np.int64(1)), widths)
        return list(parts.outputs())

    def affine(self, rows: Output, weight: Output, names: Sequence[str]) -> Output:
        product = op.matmul(rows, to_f32(weight), False, True).output(0)
        biases = [self.weights[f"{name}.bias"] for name in names if f"{name}.bias" in self.weights]
        return self.add(product, constant(np.concatenate(biases))) if biases else product

    def rms_norm(self, rows: Output, name: str, eps: float, heads: int = 1) -> Output:
        split = rows if heads == 1 else reshape(rows, [0, heads, -1])
        square = op.power(split, constant(np.float32(2)))
        mean = op.reduce_mean(square, constant(np.array([-1], np.int32)), True)
        root = op.sqrt(op.add(mean, constant(np.float32(eps))))
        normed = op.multiply(split, op.divide(constant(np.float32(1)), root))
        scaled = op.multiply(normed, constant(self.weights[f"{name}.weight"])).output(0)
        return scaled if heads == 1 else reshape(scaled, [0, heads * self.head_dim])

    def rope(self, rows: Output, positions: Output, heads: int) -> Output:
        """In the words and the rank that OpenVINO recognises and fuses: x * cos + rotate_half(x) * sin."""
        if positions not in self.angles:
            axes = constant(np.array([1, 2], np.int32))
            angles = [op.unsqueeze(self.gather(table, positions), axes).output(0) for table in self.rope_tables]
            self.angles[positions] = angles  # [rows, 1, 1, head_dim]
        cos, sin = self.angles[positions]
        shaped = reshape(rows, [0, heads, 1, -1])
        half = self.head_dim // 2
        halves = op.variadic_split(shaped, constant(np.int64(3)), constant(np.array([half, half], np.int64)))
        first, second = halves.outputs()
        turned = op.concat([op.multiply(second, constant(np.float32(-1))), first], -1)
        return reshape(op.add(op.multiply(shaped, cos), op.multiply(turned, sin)), [0, heads * self.head_dim])

    def attend(self, query: Output, key: Output, value: Output, layer: int) -> Output:
        return paged_attention(query, key, value, self.caches(layer), self.pages, self.scale)

    def caches(self, layer: int) -> Caches:
        shape = [-1, self.kv_heads, BLOCK_SIZE, self.head_dim]
        names = (f"key_cache.{layer}", f"value_cache.{layer}")
        key_cache, value_cache = (self.parameter(name, shape, ov.Type.dynamic) for name in names)
        return key_cache, value_cache

    def swiglu(self, gate: Output, up: Output) -> Output:
        return op.multiply(op.swish(gate), up).output(0)

    def add(self, left: Output, right: Output) -> Output:
        return op.add(left, right).output(0)

    def concat(self, parts: Sequence[Output]) -> Output:
        return op.concat(list(parts), 1).output(0)

    def gather(self, rows: Output, indices: Output) -> Output:
        return op.gather(rows, indices, constant(np.int32(0))).output(0)

    def argmax(self, logits: Output) -> tuple[Output, Output]:
        """The best group, then the best in it: five times faster than OpenVINO's TopK over a whole vocabulary."""
        groups, peaks = self.groups(logits)
        size = groups.get_partial_shape()[2].get_length()
        peak, group = best(peaks, 1)
        _, offset = best(group_rows(groups, group), 1)
        token = op.add(op.multiply(group, constant(np.int32(size))), offset)
        return reshape(token, [-1]), reshape(peak, [-1])

    def groups(self, logits: Output) -> tuple[Output, Output]:
        """The logits as [rows, groups, size], and the largest of each group [rows, groups]."""
        if logits not in self.grouped:
            vocab = logits.get_partial_shape()[1].get_length()
            size = math.gcd(vocab, 256)
            groups = reshape(logits, [0, vocab // size, size])
            self.grouped[logits] = groups, op.reduce_max(groups, constant(np.int32(2)), False).output(0)
        return self.grouped[logits]

    def peak_probability(self, logits: Output, peak: Output) -> Output:
        last = constant(np.array([1], np.int32))
        below = op.subtract(logits, op.unsqueeze(peak, last))
        return op.divide(constant(np.float32(1)), op.reduce_sum(op.exp(below), last, False)).output(0)

    def margin(self, logits: Output, peak: Output, probability: Output) -> Output:
        """The next logit is the second of the best group, or the best of another."""
        groups, peaks = self.groups(logits)
        best_peaks, best_groups = best(peaks, 2)
        within, _ = best(group_rows(groups, column(best_groups, 0)), 2)
        others = [column(values, 1) for values in (best_peaks, within) if values.get_partial_shape()[1] == 2]
        second = reshape(functools.reduce(lambda left, right: op.maximum(left, right).output(0), others), [-1])
        ratio = op.exp(op.subtract(second, peak))
        return op.multiply(probability, op.subtract(constant(np.float32(1)), ratio)).output(0)


class BlockGraph(PagedGraph):
    """networks.BlockOps: each request's new context and block are one subsequence."""

    def __init__(self, config: DrafterConfig, weights: Weights, precision: Precision, max_positions: int) -> None:
        super().__init__(config, weights, precision, max_positions)
        self.order, self.block_rows, self.query_rows = map(self.rows, ("order", "block_rows", "query_rows"))
        if not config.causal:
            self.last_rows, self.read_pages = self.rows("last_rows"), self.page_table("read_")

    def merge(self, context: Output, block: Output) -> Output:
        return self.gather(op.concat([context, block], 0).output(0), self.order)

    def attend_block(self, query: Output, key: Output, value: Output, layer: int, *, causal: bool) -> Output:
        caches = self.caches(layer)
        merged_query = self.gather(query, self.query_rows)
        written = paged_attention(merged_query, key, value, caches, self.pages, self.scale)
        causal_answer = self.gather(written, self.block_rows)
        if causal:
            return causal_answer
        # Nothing else orders the read after the write: the choice is always the query, but only known at run time.
        always = op.greater_equal(self.pages.max_context_len, constant(np.int32(0)))
        query_after_write = op.select(always, query, causal_answer).output(0)
        last_key, last_value = self.gather(key, self.last_rows), self.gather(value, self.last_rows)
        return paged_attention(query_after_write, last_key, last_value, caches, self.read_pages, self.scale)


def constant(values: NDArray[np.generic] | np.generic) -> Output:
    return op.constant(values).output(0)


def best(rows: Output, count: int) -> tuple[Output, Output]:
    """The largest `count` of each row, or all where there are fewer, and where they are: each [rows, count]."""
    least = min(count, rows.get_partial_shape()[1].get_length())
    values, places = op.topk(rows, constant(np.int32(least)), 1, "max", "value", "i32").outputs()
    return values, places


def column(rows: Output, index: int) -> Output:
    """One column, [rows, 1]."""
    return op.gather(rows, constant(np.array([index], np.int32)), constant(np.int32(1))).output(0)


def group_rows(groups: Output, group: Output) -> Output:
    """The one group of each row that `group` [rows, 1] names: [rows, size]."""
    one = constant(np.int32(1))
    return op.squeeze(op.gather(groups, group, one, 1), one).output(0)


def to_f32(values: Output) -> Output:
    return values if values.get_element_type() == ov.Type.f32 else op.convert(values, "f32").output(0)


def reshape(rows: Output | ov.Node, shape: Shape) -> Output:
    """0 keeps an axis, -1 takes what is left."""
    return op.reshape(rows, constant(np.array(shape, np.int64)), True).output(0)
