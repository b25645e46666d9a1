"""Tiny graphs and bundles that TensorRT-RTX compiles; its smallest attention head is 16."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import tensorrt_rtx
from dflash_reference import tiny_drafter
from tiny_checkpoints import DRAFTER, TARGET, write_drafter, write_target
from tiny_targets import TinyTarget, tiny_llama, tiny_qwen3

from dcut_engines.build_options import BuildOptions
from dcut_engines.emit_onnx import emit_drafter, emit_target
from dcut_engines.tensorrt_build import TensorRT
from dcut_engines.tensorrt_graph import append_pack
from dcut_engines.tensorrt_profiles import Layout, cache_slots

MODELS: dict[str, Callable[[], TinyTarget]] = {"llama3": lambda: tiny_llama(attention_bias=True), "qwen3": tiny_qwen3}
MAX_LEN = 96
LAYOUT = Layout(ratios=(0.25, 0.5, 1.0), max_batch=3, block_size=4, prefill_chunk=32)


def rtx(compute_capability: str, workspace_mib: int | None = None) -> TensorRT:
    version = str(tensorrt_rtx.__version__)
    return TensorRT(tensorrt_rtx, "tensorrt-rtx", version, compute_capability, workspace_mib)


def target_graph(path: Path, precision: Any, model: str = "llama3") -> int:
    """Write the graph of a tiny target; the number of its layers."""
    target = MODELS[model]()
    slots = cache_slots(MAX_LEN, LAYOUT.block_size)
    emit_target(target.config, target.weights, (0, 2), precision, slots, path, max_len=slots, window=None)
    return target.config.layers


def drafter_graph(path: Path, precision: Any, *, causal: bool) -> int:
    """Write the graph of a tiny drafter with the pack node at its tail; the number of its layers."""
    drafter = tiny_drafter(causal=causal, block_size=LAYOUT.block_size)
    slots = cache_slots(MAX_LEN, LAYOUT.block_size)
    arrays = (drafter.config, drafter.weights, drafter.embedding, drafter.head, None)
    emit_drafter(*arrays, precision, slots, path, max_len=slots)
    append_pack(path, len(LAYOUT.ratios), LAYOUT.max_batch)
    return drafter.config.layers


def edit_graph(path: Path, edit: Callable[[Any], None]) -> None:
    """Change an ONNX file in place; its weight file stays."""
    model = onnx.load(path, load_external_data=False)
    edit(model.graph)
    onnx.save_model(model, path)


def rtx_options(directory: Path, **changes: Any) -> BuildOptions:
    """A bundle to be built in directory/out/bundle, small enough to compile in two seconds."""
    target = write_target(directory / "target", {**TARGET, "head_dim": 16})
    drafter = write_drafter(directory / "drafter", {**DRAFTER, "head_dim": 16})
    options = BuildOptions(
        *(str(target), str(drafter), directory / "out" / "bundle"),
        backend="tensorrt-rtx",
        precision="fp16",
        max_batch=2,
        max_len=64,
        ratios=(0.5, 1.0),
        compute_capability="8.9",
    )
    return dataclasses.replace(options, **changes)
