"""ONNX graphs to TensorRT plans: every profile in one plan, so that weights exist once.

The only place of this package that imports tensorrt or tensorrt_rtx, whose Python is the same.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcut_engines.build_options import BuildOptions, InvalidOption
from dcut_engines.build_progress import Report
from dcut_engines.digests import cache_dir
from dcut_engines.tensorrt_graph import check_network_inputs, read_inputs
from dcut_engines.tensorrt_limits import choose_compute_capability, local_compute_capability
from dcut_engines.tensorrt_network import (
    Network,
    journal_of,
    monitor_of,
    open_builder,
    refuse_warnings,
    shown,
    stoppable,
)
from dcut_engines.tensorrt_profiles import GraphInput, PlanError, check_profile
from dcut_trt.manifest import PlanSpec, ProfileSpec

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
INSTALL = {
    "tensorrt": "pip install --extra-index-url https://pypi.nvidia.com 'dcut-trt[tensorrt]'",
    "tensorrt-rtx": "pip install 'dcut-trt[tensorrt-rtx]'",
}
OLDEST = {"tensorrt": (11, 0), "tensorrt-rtx": (1, 7)}  # the first with everything that the networks need
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorRT:
    """The compiler of one build. module: tensorrt or tensorrt_rtx.  workspace_mib: None for TensorRT's own limit."""

    module: Any
    backend: str
    version: str
    compute_capability: str
    workspace_mib: int | None = None

    @property
    def has_plugins(self) -> bool:
        """tensorrt_rtx cannot add plugins from Python; its parser inlines the node's ONNX function."""
        return self.backend == "tensorrt"


def open_tensorrt(options: BuildOptions) -> TensorRT:
    """The compiler these options ask for. Raises InvalidOption when it is missing, too old, or not for this machine."""
    name = MODULES[options.backend]
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        why = f"needs {name}: {INSTALL[options.backend]}" if missing else f"{name} cannot be imported: {error}"
        raise InvalidOption("--backend", options.backend, why) from error
    version = str(module.__version__)
    oldest = OLDEST[options.backend]
    if tuple(int(part) for part in version.split(".")[:2]) < oldest:
        needed = ".".join(map(str, oldest))
        raise InvalidOption("--backend", options.backend, f"needs {name} {needed} or newer, and {version} is installed")
    capability = choose_compute_capability(options, local_compute_capability())
    return TensorRT(module, options.backend, version, capability, options.workspace_mib)


def compile_plan(
    tensorrt: TensorRT,
    graph: Path,
    profiles: Sequence[ProfileSpec],
    plan: Path,
    *,
    precision: str,
    layers: int,
    plugins: int = 0,
    report: Report = lambda fraction: None,
) -> PlanSpec:
    """Compile an ONNX graph for all profiles, and write the plan.

    layers: attention layers, which TensorRT must see as its own.  plugins: nodes that must become plugin layers.
    Raises PlanError naming what is wrong with graph or profile, or with TensorRT's words where it refuses them.
    """
    started = time.monotonic()
    inputs = read_inputs(graph, precision)
    for profile in profiles:
        check_profile(profile, inputs)
    trt = tensorrt.module
    builder = open_builder(trt)
    network = Network(trt, builder, graph, plugins)
    check_network_inputs(inputs, network.kinds())
    network.check_native(layers)
    network.limit_keys()
    config = builder.create_builder_config()
    timing_cache = _configure(tensorrt, config)
    add_profiles(builder, config, profiles, inputs)
    monitor = config.progress_monitor = monitor_of(trt, report)
    with stoppable(monitor):
        serialized = builder.build_serialized_network(network.definition, config)
    said = journal_of(trt).take()
    if serialized is None:
        raise PlanError(f"{graph.name}: TensorRT compiled no plan: {shown(said)}")
    # It speaks of tactics and memory too, which is nobody's fault; an input that nothing reads is ours.
    refuse_warnings(graph.name, [message for message in said if "unused" in message.lower()])
    with plan.open("wb") as file:
        file.write(serialized)
    if timing_cache is not None:
        save_timing_cache(tensorrt, timing_cache)
    return PlanSpec(plan.name, serialized.nbytes, round(time.monotonic() - started, 3), tuple(profiles))


def add_profiles(builder: Any, config: Any, profiles: Sequence[ProfileSpec], inputs: Sequence[GraphInput]) -> None:
    """Add checked profiles, in order: a profile's place is its index in the engine."""
    for index, profile in enumerate(profiles):
        optimization = builder.create_optimization_profile()
        for graph_input in inputs:
            optimization.set_shape(graph_input.name, *graph_input.shapes(profile))
        if config.add_optimization_profile(optimization) != index:
            raise PlanError(f"profile {profile.name}: TensorRT refused it")


def load_timing_cache(tensorrt: TensorRT, config: Any) -> Any:
    """Start from what earlier builds measured, where this TensorRT takes it. The result must outlive the build."""
    path = timing_cache_path(tensorrt)
    for known in (path.read_bytes() if path.is_file() else b"", b""):
        cache = config.create_timing_cache(known)
        if cache is not None and config.set_timing_cache(cache, False):  # False: not those of another device
            return cache
    return None


def save_timing_cache(tensorrt: TensorRT, cache: Any) -> None:
    """Keep what this build measured. Of two builds at once the later one's measurements stay."""
    path = timing_cache_path(tensorrt)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(bytes(cache.serialize()))
    temporary.replace(path)


def timing_cache_path(tensorrt: TensorRT) -> Path:
    name = f"{tensorrt.backend}-{tensorrt.version}-sm{tensorrt.compute_capability}.timing"
    return cache_dir() / "tensorrt" / name


def _configure(tensorrt: TensorRT, config: Any) -> Any:
    """Set what is not a profile; the timing cache where there is one."""
    trt = tensorrt.module
    if tensorrt.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, tensorrt.workspace_mib * MEBIBYTE)
    if tensorrt.backend == "tensorrt":
        return load_timing_cache(tensorrt, config)
    # tensorrt-rtx measures nothing here: it finishes its plans on the GPU that runs them, and has no timing cache.
    capability = getattr(trt.ComputeCapability, f"SM{tensorrt.compute_capability.replace('.', '')}")
    config.num_compute_capabilities = 1
    if not config.set_compute_capability(capability, 0):
        raise PlanError(f"compute capability {tensorrt.compute_capability}: TensorRT refused it")
    return None


def register_pack(tensorrt: TensorRT) -> None:
    """Let the parser take the drafter's pack node as our plugin. Raises what compile.build_kernel raises."""
    from dcut_plugins.confidence_topk_pack import compile as kernels  # noqa: PLC0415 - imports tensorrt
    from dcut_plugins.confidence_topk_pack import plugin  # noqa: PLC0415

    major, minor = (int(part) for part in tensorrt.compute_capability.split("."))
    plugin.register(kernels.build_kernel("ptx", kernels.architecture_for((major, minor)), cache_dir()))
