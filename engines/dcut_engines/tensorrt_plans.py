"""The plans of a bundle: each network as ONNX in a scratch directory, then compiled from there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dcut_engines.tensorrt_build import compile_plan, register_pack
from dcut_engines.tensorrt_graph import append_pack
from dcut_engines.tensorrt_profiles import Layout, drafter_profiles, target_profiles
from dcut_trt.manifest import PlanSpec

if TYPE_CHECKING:
    from dcut_engines.build_inputs import Inputs, TensorNames
    from dcut_engines.bundle import Progress

    Emit = Callable[[Path, Inputs], TensorNames]


def write_plans(
    directory: Path, inputs: Inputs, emit: Mapping[str, Emit], progress: Progress
) -> tuple[dict[str, TensorNames], dict[str, PlanSpec]]:
    """Write NAME.plan for target and drafter; returns tensor names and plans by network.

    emit: writes NAME.onnx into a directory. That takes as much disk as the plan, and is gone afterwards.
    """
    tensorrt, options = inputs.tensorrt, inputs.options
    assert tensorrt is not None
    layers = {"target": inputs.target.config.layers, "drafter": inputs.drafter.config.layers}
    block_size = inputs.drafter.config.block_size
    layout = Layout(options.ratios, options.max_batch, block_size, options.longest_prefill)
    profiles = {"target": target_profiles(layout), "drafter": drafter_profiles(layout)}
    packs = {"target": False, "drafter": True}
    tensors: dict[str, TensorNames] = {}
    plans: dict[str, PlanSpec] = {}
    for name, attention_layers in layers.items():
        with tempfile.TemporaryDirectory(dir=directory, prefix="onnx-") as scratch:
            graph = Path(scratch) / f"{name}.onnx"
            with progress(f"write the {name}"):
                tensors[name] = emit[name](graph.parent, inputs)
                if packs[name]:
                    tensors[name] = append_pack(graph, len(options.ratios), options.max_batch)
            with progress(f"compile the {name}") as report:
                if packs[name] and tensorrt.has_plugins:
                    register_pack(tensorrt)
                plans[name] = compile_plan(
                    tensorrt,
                    graph,
                    profiles[name],
                    directory / f"{name}.plan",
                    precision=options.precision,
                    layers=attention_layers,
                    plugins=int(packs[name] and tensorrt.has_plugins),
                    report=report or (lambda fraction: None),
                )
    return tensors, plans
