"""OpenVINO on CPU: paged attention over packed ragged rows (inputs and outputs: docs/graphs.md)."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from dcut_trt.backends.base import Limits
from dcut_trt.config import EngineOptions
from dcut_trt.errors import EngineMismatch
from dcut_trt.manifest import Manifest
from dcut_trt.stage_types import Draft, DraftInput, Rows, Verified
from dcut_trt.types import IntArray

BLOCK_SIZE = 32  # tokens per KV block; the CPU plugin's attention is written for it
DEFAULT_KV_MIB = 4096
_KV_TYPES = {"fp32": ov.Type.f32, "bf16": ov.Type.bf16}


def load_openvino(bundle: Path, manifest: Manifest, options: EngineOptions) -> tuple[OpenVinoTarget, OpenVinoDrafter]:
    """Compile both graphs of a bundle for this CPU and allocate their KV caches.

    Raises EngineMismatch when the bundle was written for another OpenVINO.
    """
    built, here = manifest.versions.get("openvino", "unknown"), ov.__version__.partition("-")[0]
    if built.partition("-")[0] != here:
        # Paged attention is a private op of OpenVINO: another version may read the graph and compute something else.
        raise EngineMismatch(f"{bundle} was built for OpenVINO {built}; this is {here}. Rebuild it: dcut-trt build")
    limits = plan_limits(manifest, options)
    core = ov.Core()
    core.get_versions("CPU")  # loads the plugin, and with it the paged attention op that the graphs name
    settings = _settings(manifest.precision, options.threads)
    target = _Graph(core, bundle / "target.xml", settings)
    drafter = _Graph(core, bundle / "drafter.xml", settings)
    kind = _KV_TYPES[manifest.precision]
    target.allocate_cache(manifest.target.layers, limits.num_blocks, kind)
    drafter.allocate_cache(manifest.drafter.layers, limits.num_blocks, kind)
    drafted = OpenVinoDrafter(drafter, limits, manifest.drafter.mask_token_id, causal=manifest.drafter.causal)
    return OpenVinoTarget(target, limits), drafted


def plan_limits(manifest: Manifest, options: EngineOptions) -> Limits:
    """Limits with as many KV blocks as the memory option allows, at most what a full batch can use.

    Raises EngineMismatch when the memory cannot hold one request of max_len.
    """
    width = 4 if manifest.precision == "fp32" else 2
    per_token = sum(2 * net.layers * net.kv_heads * net.head_dim * width for net in (manifest.target, manifest.drafter))
    each = -(-(manifest.max_len + manifest.draft_length) // BLOCK_SIZE)
    memory = (options.kv_memory_mib or DEFAULT_KV_MIB) << 20
    blocks = min(manifest.max_batch * each, memory // (per_token * BLOCK_SIZE))
    if blocks < each:
        need = -(-each * per_token * BLOCK_SIZE >> 20)
        raise EngineMismatch(
            f"kv_memory_mib={memory >> 20}: one request of {manifest.max_len} tokens needs {need} MiB of KV cache"
        )
    return Limits(
        max_batch=manifest.max_batch,
        max_len=manifest.max_len,
        draft_length=manifest.draft_length,
        vocab_size=manifest.target.vocab_size,
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        feature_size=manifest.feature_size,
        any_budget=True,
        short_blocks=manifest.drafter.causal,  # a block that is read both ways drafts other tokens when it is shorter
    )


def runtime_version() -> str:
    """The runtime that a cost table was measured with."""
    return f"openvino {ov.__version__}"


def _settings(precision: str, threads: int | None) -> dict[str, Any]:
    kind = "f32" if precision == "fp32" else "bf16"
    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": kind,
        "KV_CACHE_PRECISION": kind,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
    }
    return settings if threads is None else settings | {"INFERENCE_NUM_THREADS": threads}


class _Graph:
    """One compiled graph, its one infer request, and its KV cache."""

    def __init__(self, core: ov.Core, path: Path, settings: Mapping[str, Any]) -> None:
        model = core.read_model(path)
        restore_head_info(model)
        self._model = core.compile_model(model, "CPU", dict(settings))
        self._request = self._model.create_infer_request()
        self._inputs = {port.any_name: index for index, port in enumerate(self._model.inputs)}
        self._outputs = {port.any_name: index for index, port in enumerate(self._model.outputs)}
        self._cache: list[ov.Tensor] = []
        self._bound: dict[str, NDArray[Any]] = {}
        self.network_ms = 0.0

    def allocate_cache(self, layers: int, num_blocks: int, kind: ov.Type) -> None:
        """Bind key_cache.i and value_cache.i; the graph writes them in place."""
        for layer in range(layers):
            for name in (f"key_cache.{layer}", f"value_cache.{layer}"):
                shape = self._model.inputs[self._inputs[name]].partial_shape
                tensor = ov.Tensor(kind, ov.Shape([num_blocks, *(shape[axis].get_length() for axis in (1, 2, 3))]))
                self._request.set_input_tensor(self._inputs[name], tensor)
                self._cache.append(tensor)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        for name, value in inputs.items():
            # The request reads the arrays in place, so `_bound` keeps them alive; one that it has already is left.
            if self._bound.get(name) is not value:
                self._request.set_input_tensor(self._inputs[name], ov.Tensor(value, shared_memory=True))
                self._bound[name] = value
        begun = time.perf_counter()
        self._request.infer()
        self.network_ms += (time.perf_counter() - begun) * 1e3

    def has_output(self, name: str) -> bool:
        return name in self._outputs

    def output(self, name: str) -> NDArray[Any]:
        """A view that the next run overwrites."""
        data: NDArray[Any] = self._request.get_output_tensor(self._outputs[name]).data
        return data

    def close(self) -> None:
        self._cache.clear()
        del self._request, self._model


class OpenVinoTarget:
    """The target behind the Target protocol. The arrays it returns are valid until its next call."""

    def __init__(self, graph: _Graph, limits: Limits) -> None:
        self.limits = limits
        self._graph = graph
        self._pages = Pages()

    @property
    def network_ms(self) -> float:
        return self._graph.network_ms

    def forward(self, rows: Rows, head_rows: IntArray, logit_rows: IntArray) -> Verified:
        self._graph.run(
            {
                "token_ids": rows.token_ids,
                "positions": rows.positions,
                "head_rows": head_rows,
                "logit_rows": logit_rows,
                **self._pages.inputs(rows.past_lens, rows.cu_lens, rows.block_tables),
            }
        )
        argmax, features, logits = (self._graph.output(name) for name in ("argmax", "features", "logits"))
        return Verified(argmax, features, logits)

    def close(self) -> None:
        self._graph.close()


class OpenVinoDrafter:
    """The drafter behind the Drafter protocol."""

    def __init__(self, graph: _Graph, limits: Limits, mask_token_id: int, *, causal: bool) -> None:
        self._graph = graph
        self._width = limits.draft_length + 1
        self._mask = mask_token_id
        self._causal = causal
        self._pages, self._read_pages = Pages(), Pages()

    @property
    def network_ms(self) -> float:
        return self._graph.network_ms

    def propose(self, drafts: DraftInput) -> Draft:
        """One subsequence per request: [new context rows, anchor, MASK x D].

        #  merged row:    0    1    2    3    4    5    6    7    8        B = 2, D = 2
        #  request a:    ctx  anc  MSK  MSK                               begins = [0, 4, 9]
        #  request b:                        ctx  ctx  anc  MSK  MSK      block_rows = [1, 2, 3, 6, 7, 8]
        """
        batch = len(drafts.anchors)
        width = self._width if drafts.depth is None else drafts.depth + 1
        new_rows = [sum(map(len, pieces)) for pieces in drafts.features]  # [B]
        layout = block_layout(tuple(new_rows), width)
        block_ids = np.full((batch, width), self._mask, np.int32)
        block_ids[:, 0] = drafts.anchors
        begins = layout.begins
        shift = np.repeat(drafts.context_lens - begins[:-1], np.diff(begins))  # [M], from merged row to position
        inputs = {
            "features": np.concatenate([np.asarray(piece) for pieces in drafts.features for piece in pieces]),  # [C, F]
            "block_ids": block_ids.ravel(),
            "order": layout.order,
            "block_rows": layout.block_rows,
            "query_rows": layout.query_rows,
            "positions": np.arange(begins[-1], dtype=np.int32) + shift,
            "draft_rows": layout.draft_rows,
            **self._pages.inputs(drafts.context_lens, begins, drafts.block_tables),
        }
        if not self._causal:
            inputs |= self._read_inputs(drafts, begins, np.array(new_rows, np.int32), width)
        self._graph.run(inputs)
        shape = (batch, width - 1)
        tokens, confidence = (self._graph.output(name).reshape(shape).copy() for name in ("tokens", "confidence"))
        # A bundle that was built before there were margins drafts without them.
        told = self._graph.has_output("margin")
        return Draft(tokens, confidence, margin=self._graph.output("margin").reshape(shape).copy() if told else None)

    def _read_inputs(
        self, drafts: DraftInput, begins: IntArray, new_rows: IntArray, width: int
    ) -> dict[str, NDArray[Any]]:
        """Every block row reads as a subsequence of one token, which stands at the last position of its block."""
        last_position = np.repeat(drafts.context_lens + new_rows + width - 1, width)  # [N]
        tables = tuple(table for table in drafts.block_tables for _ in range(width))
        begins_each = np.arange(len(last_position) + 1, dtype=np.int32)
        pages = self._read_pages.inputs(last_position, begins_each, tables)
        return {"last_rows": np.repeat(begins[1:] - 1, width), **{f"read_{name}": page for name, page in pages.items()}}

    def close(self) -> None:
        self._graph.close()


def restore_head_info(model: ov.Model) -> None:
    """Give paged attention back the head counts and sizes that a saved model loses; the caches' shapes hold them."""
    for node in model.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            info = node.get_rt_info()
            for kind, port in (("k", 3), ("v", 4)):
                _, heads, _, size = node.input(port).get_partial_shape()
                info[f"num_{kind}_heads"], info[f"{kind}_head_size"] = heads.get_length(), size.get_length()


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How new context rows and blocks interleave (docs/graphs.md): begins [B + 1], order [M], block_rows [N],
    query_rows [M], draft_rows [B * D]."""

    begins: IntArray
    order: IntArray
    block_rows: IntArray
    query_rows: IntArray
    draft_rows: IntArray


@functools.lru_cache(maxsize=256)
def block_layout(new_rows: tuple[int, ...], width: int) -> BlockLayout:
    """The layout for requests with these numbers of new context rows, and blocks of `width` = D + 1 rows."""
    new = np.array(new_rows, np.int32)
    context, count = int(new.sum()), len(new) * width  # C, N
    begins = np.zeros(len(new) + 1, np.int32)
    np.cumsum(new + width, out=begins[1:])
    block = np.arange(count, dtype=np.int32)
    block_rows = np.repeat(begins[:-1] + new, width) + block % width
    is_context = np.ones(begins[-1], bool)
    is_context[block_rows] = False
    order = np.empty(begins[-1], np.int32)
    order[is_context] = np.arange(context, dtype=np.int32)
    order[block_rows] = context + block
    query_rows = np.zeros(begins[-1], np.int32)
    query_rows[block_rows] = block
    return BlockLayout(begins, order, block_rows, query_rows, block[block % width > 0])


class Pages:
    """The inputs that tell paged attention where each subsequence's rows are."""

    def __init__(self) -> None:
        self._tables: tuple[IntArray, ...] = ()
        self._joined: dict[str, NDArray[Any]] = {}

    def inputs(self, past_lens: IntArray, begins: IntArray, tables: tuple[IntArray, ...]) -> dict[str, NDArray[Any]]:
        """Block tables are joined anew only when other requests run than at the last call."""
        if len(tables) != len(self._tables) or any(map(operator.is_not, tables, self._tables)):
            table_begins = np.zeros(len(tables) + 1, np.int32)
            np.cumsum([len(table) for table in tables], out=table_begins[1:])
            self._tables = tables
            self._joined = {"block_indices": np.concatenate(tables), "block_indices_begins": table_begins}
        longest = (past_lens + np.diff(begins)).max()
        return {
            "past_lens": past_lens,
            "subsequence_begins": begins,
            "max_context_len": np.array(longest, np.int32),
            **self._joined,
        }
