"""Networks as ONNX graphs in the window form, for TensorRT (inputs and outputs: docs/graphs.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dcut_engines.model_config import DecoderConfig, DrafterConfig, Weights
from dcut_engines.networks.decoder import decoder
from dcut_engines.networks.dflash import EMBEDDING, HEAD, drafter
from dcut_engines.networks.rope import rope_tables
from dcut_engines.onnx_graph import OnnxGraph, OnnxPrecision
from dcut_engines.onnx_window import Window, drafter_blocks, request_inputs, target_window

TensorNames = dict[str, list[str]]


def emit_target(
    config: DecoderConfig,
    weights: Weights,
    feature_layers: tuple[int, ...],
    precision: OnnxPrecision,
    max_positions: int,
    path: Path,
    *,
    max_len: int,
    window: int | None,
) -> TensorNames:
    """Write the target to `path` (.onnx, with its .data beside it); returns its input and output names.

    max_len: slots of each request's cache, S_max. Every call writes a whole window, so a request of n tokens needs
    n + W slots. window: W, or None when each call chooses it by the length of its input `window_offsets`.
    """
    with OnnxGraph("target", path, precision) as graph:
        token_ids, positions, request_rows, depths = (
            graph.input(name, "i32", ["K"]) for name in ("token_ids", "positions", "request_rows", "depths")
        )
        requests = request_inputs(graph, "subsequence_begins", window, max_len)
        step = target_window(graph, request_rows, depths, requests)
        ops = WindowOps(graph, config, weights, step, max_positions, max_len)
        outputs = decoder(
            ops,
            config,
            feature_layers,
            token_ids=token_ids,
            positions=positions,
            head_rows=graph.input("head_rows", "i32", ["H"]),
            logit_rows=graph.input("logit_rows", "i32", ["S"]),
        )
        graph.output("argmax", outputs.argmax, "i32", ["H"])
        if outputs.features is not None:
            graph.output("features", outputs.features, precision, ["K", len(feature_layers) * config.hidden_size])
        graph.output("logits", ops.as_f32(outputs.logits), "fp32", ["S", config.vocab_size])
        return graph.save()


def emit_drafter(  # noqa: PLR0913
    config: DrafterConfig,
    weights: Weights,
    embedding: NDArray[np.float32],
    head: NDArray[np.float32],
    draft_vocab: NDArray[np.int32] | None,
    precision: OnnxPrecision,
    max_positions: int,
    path: Path,
    *,
    max_len: int,
) -> TensorNames:
    """Write the drafter as emit_target writes the target; each call chooses its window.

    embedding [V, hidden] and head [V', hidden] are the target's; draft_vocab [V'] names the head's rows when it is a
    subset. One array passed as both is stored once.
    """
    with OnnxGraph("drafter", path, precision) as graph:
        features = graph.input("features", precision, ["C", weights["fc.weight"].shape[1]])
        context_positions = graph.input("context_positions", "i32", ["C"])
        anchors = graph.input("anchors", "i32", ["B"])
        requests = request_inputs(graph, "context_begins", None, max_len)
        blocks = drafter_blocks(graph, config, anchors, context_positions, requests)
        borrowed = {f"{EMBEDDING}.weight": embedding, f"{HEAD}.weight": head}
        ops = WindowOps(graph, config, {**weights, **borrowed}, blocks.window, max_positions, max_len)
        if head is embedding:
            ops.stored_as[HEAD] = EMBEDDING
        outputs = drafter(
            ops,
            config,
            features=features,
            block_ids=blocks.ids,
            positions=graph.node("Concat", [context_positions, blocks.positions], axis=0),
            block_positions=blocks.positions,
            draft_rows=blocks.draft_rows,
            draft_vocab=None if draft_vocab is None else graph.weight("draft_vocab", draft_vocab.astype(np.int32)),
        )
        by_request = graph.constant([-1, config.draft_length])
        for name, value, kind in (("tokens", outputs.tokens, "i32"), ("confidence", outputs.confidence, "fp32")):
            graph.output(name, graph.node("Reshape", [value, by_request]), kind, ["B", config.draft_length])
        return graph.save()


class WindowOps:
    """networks.Ops over ONNX: packed rows [rows, channels] outside attention, a window [B, W] of them inside."""

    def __init__(
        self,
        graph: OnnxGraph,
        config: DecoderConfig | DrafterConfig,
        weights: Weights,
        window: Window,
        max_positions: int,
        max_len: int,
    ) -> None:
        self.graph = graph
        self.config = config
        self.weights = weights
        self.window = window
        self.max_len = max_len
        self.stored_as: dict[str, str] = {}
        self._casts: dict[tuple[str, str], str] = {}
        tables = zip(("rope.cos", "rope.sin"), rope_tables(config.rope, config.head_dim, max_positions), strict=True)
        self._rope_tables = [graph.weight(name, table) for name, table in tables]  # [max_positions, head_dim / 2]

    # --- rows

    def embed(self, ids: str, name: str) -> str:
        return self.gather(self._weight(f"{name}.weight"), ids)

    def linear(self, rows: str, name: str) -> str:
        product = self.graph.node("MatMul", [rows, self._transposed(self.stored_as.get(name, name))], name=name)
        bias = f"{name}.bias"
        return self.add(product, self._weight(bias)) if bias in self.weights else product

    def linears(self, rows: str, names: Sequence[str]) -> list[str]:
        return [self.linear(rows, name) for name in names]

    def rms_norm(self, rows: str, name: str, eps: float, heads: int = 1) -> str:
        split = rows if heads == 1 else self._reshape(rows, [0, heads, -1])
        normed = self.graph.node("RMSNormalization", [split, self._weight(f"{name}.weight")], axis=-1, epsilon=eps)
        return normed if heads == 1 else self._reshape(normed, [0, -1])

    def rope(self, rows: str, positions: str, heads: int) -> str:
        batch = self.graph.constant([0])
        position_ids = self.graph.node("Unsqueeze", [self._cast(positions, "i64"), batch])  # [1, rows]
        one_sequence = self.graph.node("Unsqueeze", [rows, batch])  # [1, rows, channels]
        turned = self.graph.node("RotaryEmbedding", [one_sequence, *self._rope_tables, position_ids], num_heads=heads)
        return self.graph.node("Squeeze", [turned, batch])

    def swiglu(self, gate: str, up: str) -> str:
        return self.graph.node("Mul", [self.graph.node("Mul", [gate, self.graph.node("Sigmoid", [gate])]), up])

    def add(self, left: str, right: str) -> str:
        return self.graph.node("Add", [left, right])

    def concat(self, parts: Sequence[str]) -> str:
        return self.graph.node("Concat", parts, axis=1)

    def gather(self, rows: str, indices: str) -> str:
        return self.graph.node("Gather", [rows, indices], axis=0)

    def argmax(self, logits: str) -> tuple[str, str]:
        one = self.graph.constant([1])
        best = self.graph.nodes("TopK", [self.as_f32(logits), one], 2, axis=1)
        values, indices = (self.graph.node("Squeeze", [column, one]) for column in best)
        return self.graph.cast(indices, "i32"), values

    def peak_probability(self, logits: str, peak: str) -> str:
        axis = self.graph.constant([1])
        below = self.graph.node("Sub", [self.as_f32(logits), self.graph.node("Unsqueeze", [peak, axis])])
        total = self.graph.node("ReduceSum", [self.graph.node("Exp", [below]), axis], keepdims=0)
        return self.graph.node("Reciprocal", [total])

    def margin(self, logits: str, peak: str, probability: str) -> None:
        return None

    def as_f32(self, value: str) -> str:
        return value if self.graph.precision == "fp32" else self._cast(value, "fp32")

    # --- attention

    def attend(self, query: str, key: str, value: str, layer: int) -> str:
        queries = self.graph.node("Gather", [query, self.window.rows], axis=0)  # [B, W, channels]
        attended = self._attention(self._reshape(queries, [0, 0, self.config.heads, -1]), key, value, layer)
        assert self.window.cells is not None
        return self.gather(attended, self.window.cells)

    def merge(self, context: str, block: str) -> str:
        return self.graph.node("Concat", [context, block], axis=0)

    def attend_block(self, query: str, key: str, value: str, layer: int, *, causal: bool) -> str:
        assert isinstance(self.config, DrafterConfig)
        assert causal == self.config.causal  # the mask was built once, from the config
        queries = self._reshape(query, [-1, self.config.block_size, self.config.heads, self.config.head_dim])
        return self._attention(queries, key, value, layer)

    def _attention(self, queries: str, key: str, value: str, layer: int) -> str:
        """queries [B, n, heads, head_dim] over the updated cache -> [B * n, heads * head_dim]."""
        inputs = [
            self._transpose_heads(queries),
            self._update(f"key_cache.{layer}", f"key_cache_out.{layer}", key),
            self._update(f"value_cache.{layer}", f"value_cache_out.{layer}", value),
            self.window.mask,
        ]
        attended = self.graph.node("Attention", inputs, scale=self.config.head_dim**-0.5)
        return self._reshape(self._transpose_heads(attended), [-1, self.config.heads * self.config.head_dim])

    def _update(self, cache: str, updated: str, rows: str) -> str:
        """Write the window of rows [.., kv_heads * head_dim] into the cache, which a runtime may do in place."""
        self.graph.input(cache, self.graph.precision, self._cache_shape())
        cells = self.graph.node("Gather", [rows, self.window.rows], axis=0)
        cells = self._transpose_heads(self._reshape(cells, [0, 0, self.config.kv_heads, -1]))
        inputs = [cache, cells, self.window.write_indices]
        # The node's own output leaves the graph: TensorRT aliases it with the input only when nothing stands between.
        self.graph.node("TensorScatter", inputs, name=updated, axis=2, mode="linear")
        self.graph.expose(updated, self.graph.precision, self._cache_shape())
        return updated

    def _cache_shape(self) -> list[int | str]:
        return ["B", self.config.kv_heads, self.max_len, self.config.head_dim]

    # --- helpers

    def _transpose_heads(self, values: str) -> str:
        """[B, n, heads, head_dim] <-> [B, heads, n, head_dim]."""
        return self.graph.node("Transpose", [values], perm=[0, 2, 1, 3])

    def _reshape(self, values: str, shape: Sequence[int]) -> str:
        """0 keeps a dimension."""
        return self.graph.node("Reshape", [values, self.graph.constant(shape)])

    def _cast(self, value: str, kind: str) -> str:
        """Once per value: positions are cast for every layer."""
        if (value, kind) not in self._casts:
            self._casts[value, kind] = self.graph.cast(value, kind)
        return self._casts[value, kind]

    def _weight(self, name: str) -> str:
        return name if self.graph.has(name) else self.graph.weight(name, self.weights[name])

    def _transposed(self, name: str) -> str:
        """The weight [out, in] of a linear as [in, out]; a table that is also embedded from stays one tensor."""
        weight, turned = f"{name}.weight", f"{name}.weight.T"
        if self.graph.has(weight):
            return self.graph.node("Transpose", [weight], perm=[1, 0])
        return self.graph.weight(turned, self.weights[weight].T)
