"""TensorRT on a GPU, and TensorRT-RTX, whose Python is the same: checks and loads the two plans of a bundle.

What runs in our tests is this code on a stand-in of TensorRT's runtime over ONNX Runtime. On a GPU nothing of it has
run yet: neither TensorRT itself, nor CudaDevice, nor the CUDA graphs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcut_trt.backends.base import Limits
from dcut_trt.backends.tensorrt_api import Engine, PluginRegistry, Runtime
from dcut_trt.backends.tensorrt_cuda import CudaDevice
from dcut_trt.backends.tensorrt_device import Device, Transfers
from dcut_trt.backends.tensorrt_drafter import TensorRtDrafter
from dcut_trt.backends.tensorrt_memory import Memory, cache_count, cache_row_bytes, memory_bytes
from dcut_trt.backends.tensorrt_plan import Plan
from dcut_trt.backends.tensorrt_target import TensorRtTarget
from dcut_trt.backends.tensorrt_tensors import Tensors, check_engine, drafter_tensors, target_tensors
from dcut_trt.config import EngineOptions
from dcut_trt.errors import BundleError, EngineMismatch, UnsupportedOption
from dcut_trt.kv.slots import SlotMap
from dcut_trt.manifest import Manifest, PlanSpec
from dcut_trt.plans import check_plan_fits

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
PLUGIN, PLUGIN_VERSION, PLUGIN_NAMESPACE = "ConfidenceTopKPack", "1", "dcut"
ONNX_TAG = b"\x08"  # the first byte of every ONNX file: its field ir_version
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorRt:
    """What this backend stands on. module: tensorrt or tensorrt_rtx.  cuda_graphs: False enqueues every call anew."""

    module: Any
    backend: str
    device: Device
    cuda_graphs: bool = True

    @property
    def version(self) -> str:
        return str(self.module.__version__)

    @property
    def description(self) -> str:
        """What a cost table depends on."""
        return f"{self.backend} {self.version}, {self.device.name}, CUDA graphs {'on' if self.cuda_graphs else 'off'}"


def open_tensorrt(backend: str, *, cuda_graphs: bool = True) -> TensorRt:
    """backend: of the manifest, a key of MODULES. Raises EngineMismatch when TensorRT, torch or a GPU is missing."""
    name = MODULES[backend]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        module = None
    if not hasattr(module, "Runtime"):  # a folder of that name also imports, as an empty namespace
        raise EngineMismatch(f"the bundle needs {name}, which is not installed here: pip install 'dcut-trt[{backend}]'")
    return TensorRt(module, backend, CudaDevice(), cuda_graphs)


def load_tensorrt(
    bundle: Path, manifest: Manifest, options: EngineOptions, runtime: TensorRt
) -> tuple[TensorRtTarget, TensorRtDrafter]:
    """Load both plans of a bundle whose files are verified, and allocate everything they need.

    Raises EngineMismatch for a bundle of another TensorRT or device, a missing plugin, or too little memory;
    BundleError for a file that is no plan, or not the manifest's; UnsupportedOption.
    """
    _check_options(options, manifest)
    _check_fits(bundle, manifest, runtime)
    device = runtime.device
    target, drafter = target_tensors(manifest), drafter_tensors(manifest)
    sides = {"target": (manifest.plans["target"], target), "drafter": (manifest.plans["drafter"], drafter)}
    limits = plan_limits(manifest, options, target, drafter)
    slots, prompt_rows = limits.max_batch, options.prefill_chunk
    needs = {
        f"{name} {part}": nbytes
        for name, side in sides.items()
        for part, nbytes in memory_bytes(*side, slots, prompt_rows).items()
    }
    _check_memory(bundle, device, {**{spec.file: spec.size for spec, _ in sides.values()}, **needs})
    engines = _load_engines(bundle, runtime, sides)
    # One stream runs one context at a time, so all of them share what the largest needs.
    scratch_bytes = max(engine.device_memory_size_v2 for engine in engines.values())
    _check_memory(bundle, device, {**needs, "scratch": scratch_bytes})
    transfers = Transfers(device)
    memory = Memory(transfers, sides["target"], sides["drafter"], slots=slots, prompt_rows=prompt_rows)
    scratch = device.allocate(max(1, scratch_bytes))
    addresses = {"target": memory.target_addresses(), "drafter": memory.drafter_addresses()}
    plans = {name: Plan(name, engines[name], *side, device) for name, side in sides.items()}
    for name, plan in plans.items():
        plan.open(runtime.module, scratch, addresses[name], graphs=runtime.cuda_graphs)
    transfers.synchronize()
    chunk = manifest.prefill_chunk
    return (
        TensorRtTarget(plans["target"], memory, limits, chunk),
        TensorRtDrafter(plans["drafter"], plans["target"], memory, prefill_chunk=chunk, pad=runtime.cuda_graphs),
    )


def plan_limits(manifest: Manifest, options: EngineOptions, *tensors: Tensors) -> Limits:
    """Limits with one KV block per request, its slot in both caches; as many as kv_memory_mib holds.

    Raises EngineMismatch when it cannot hold one.
    """
    block_size = manifest.draft_length + 1
    if manifest.cache_slots < manifest.max_len + 2 * block_size:
        # The drafter's window is two blocks long, and may start at a request's last position.
        raise BundleError(f"cache_slots={manifest.cache_slots}: {manifest.max_len} tokens need two blocks more")
    each = sum(cache_count(plan) * cache_row_bytes(plan) for plan in tensors)
    slots = manifest.max_batch
    if options.kv_memory_mib is not None:
        rows = options.kv_memory_mib * MEBIBYTE // each
        slots = max((count for count in range(slots + 1) if count == 0 or SlotMap(count).rows <= rows), default=0)
        if slots == 0:
            need = -(-each // MEBIBYTE)
            raise EngineMismatch(f"kv_memory_mib={options.kv_memory_mib}: one request needs {need} MiB of KV cache")
    return Limits(
        max_batch=slots,
        max_len=manifest.max_len,
        draft_length=manifest.draft_length,
        vocab_size=manifest.target.vocab_size,
        block_size=manifest.cache_slots,
        num_blocks=slots,
        feature_size=manifest.feature_size,
    )


def _check_options(options: EngineOptions, manifest: Manifest) -> None:
    """Raise UnsupportedOption for an option that means nothing here, or a policy that asks for more than plans take."""
    if options.threads is not None:
        raise UnsupportedOption(f"threads={options.threads}: not with --backend {manifest.backend}, which has none")
    policy, ratios = options.policy, manifest.ratios
    wanted = _largest_ratio(policy, manifest.draft_length + 1)
    if wanted > max(ratios):
        raise UnsupportedOption(
            f"policy={policy!r}: the plans verify up to a ratio of {max(ratios):g}; build with --ratios .., {wanted:g}"
        )


def _largest_ratio(policy: str, block: int) -> float:
    """The largest share of B * (D + 1) = B * `block` rows that a policy may verify; 0 when it keeps to the plans'."""
    kind, _, number = policy.partition(":")
    if kind in ("plain", "dcut", "dcut-vllm", "auto"):
        return 0.0
    if kind == "ratio":
        return float(number)
    return min(int(number) + 1, block) / block if kind == "depth" else 1.0


def _check_fits(bundle: Path, manifest: Manifest, runtime: TensorRt) -> None:
    capability = runtime.device.compute_capability
    check_plan_fits(manifest, bundle, backend=runtime.backend, version=runtime.version, compute_capability=capability)


def _check_memory(bundle: Path, device: Device, parts: Mapping[str, int]) -> None:
    need, have = sum(parts.values()), device.free_bytes()
    if need > have:
        shown = ", ".join(f"{name} {-(-nbytes // MEBIBYTE)}" for name, nbytes in parts.items())
        raise EngineMismatch(
            f"{bundle}: needs {-(-need // MEBIBYTE)} MiB of device memory ({shown}), and {have // MEBIBYTE} MiB are "
            "free. Serve fewer requests with --kv-memory-mib, or build with a smaller --max-batch or --max-len"
        )


def _load_engines(bundle: Path, runtime: TensorRt, sides: Mapping[str, tuple[PlanSpec, Tensors]]) -> dict[str, Engine]:
    journal = _journal(runtime.module)
    loader: Runtime = runtime.module.Runtime(journal)
    engines = {}
    for name, (spec, tensors) in sides.items():
        data = (bundle / spec.file).read_bytes()
        if data.startswith(ONNX_TAG):
            raise BundleError(f"{bundle / spec.file} is an ONNX graph, not a TensorRT plan. Rebuild: dcut-trt build")
        journal.messages.clear()
        engine = loader.deserialize_cuda_engine(data)
        if engine is None:
            if name == "drafter" and runtime.backend == "tensorrt":
                _check_plugin(runtime.module, bundle / spec.file)
            said = " | ".join(journal.messages[-3:]) or "it said nothing"
            raise BundleError(f"{bundle / spec.file}: TensorRT cannot load it ({said}). Rebuild: dcut-trt build")
        check_engine(runtime.module, engine, spec, tensors)
        engines[name] = engine
    return engines


def _check_plugin(trt: Any, plan: Path) -> None:
    """Raise EngineMismatch where a plan that does not load could lack its plugin.

    A plan holds our kernel compiled, and should load without the plugin's Python; only TensorRT knows whether it does.
    """
    registry: PluginRegistry = trt.get_plugin_registry()
    if registry.get_creator(PLUGIN, PLUGIN_VERSION, PLUGIN_NAMESPACE) is None:
        raise EngineMismatch(
            f"{plan}: TensorRT cannot load it, and no creator of plugin {PLUGIN}, version {PLUGIN_VERSION}, namespace "
            f"{PLUGIN_NAMESPACE!r} is registered in this process; dcut_plugins.confidence_topk_pack.plugin registers it"
        )


def _journal(trt: Any) -> Any:
    """A logger that remembers warnings and errors. TensorRT keeps the first of a process, and ignores later ones."""

    class Journal(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if int(severity) <= int(trt.ILogger.WARNING):
                self.messages.append(" ".join(message.split()))

    return Journal()
