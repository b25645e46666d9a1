"""Bundles for the double: the product's own build, with the ONNX graphs themselves in the place of compiled plans."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_device import HostDevice
from tiny_checkpoints import (
    DRAFTER,
    QWEN3,
    TARGET,
    drafter_shapes_of,
    tokenizer_json,
    write_config,
    write_safetensors,
)
from trt_double import make_double, write_plan

from dcut_engines import build_options, bundle, tensorrt_plans
from dcut_engines.build_options import BuildOptions
from dcut_engines.hf_config import read_decoder_config
from dcut_engines.tensorrt_build import TensorRT
from dcut_engines.tensorrt_graph import read_inputs
from dcut_engines.weights import decoder_shapes
from dcut_trt.backends.tensorrt import TensorRt, load_tensorrt
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.manifest import PlanSpec, ProfileSpec, read_manifest
from dcut_trt.spec.policies import make_policy
from dcut_trt.spec.policy import Policy
from dcut_trt.tokenizer import Tokenizer

VERSION, CAPABILITY = "11.4.0.106", "8.9"
PLUGIN = ("ConfidenceTopKPack", "1", "dcut")
LIVELY = 3  # tokens that ever win, so that random drafts are often right
SHAPE = {"head_dim": 16, "hidden_size": 64, "tie_word_embeddings": False}
TARGETS: dict[str, dict[str, Any]] = {"llama": {**TARGET, **SHAPE}, "qwen3": {**QWEN3, **SHAPE}}
TINY_DRAFTER = {**DRAFTER, "hidden_size": 64, "head_dim": 16}
# With 7, full blocks of 5 or 6 requests fall between two buckets.
MAX_BATCH, MAX_LEN, BLOCK, CHUNK = 7, 64, 4, 16

_FOLDER = tempfile.TemporaryDirectory(prefix="double-bundles-")


def tiny_bundle(architecture: str = "llama", backend: str = "tensorrt", precision: str = "fp32") -> Path:
    """A lively target and drafter of random weights. Read-only: copy it before changing a file."""
    return _built(architecture, backend, precision)


@functools.cache
def _built(architecture: str, backend: str, precision: str) -> Path:
    folder = Path(_FOLDER.name) / f"{architecture}-{backend}-{precision}"
    target, drafter = folder / "target", folder / "drafter"
    write_checkpoint(target, TARGETS[architecture], decoder_shapes, seed=1)
    write_checkpoint(drafter, TINY_DRAFTER, None, seed=2)
    sizes: dict[str, Any] = {"max_batch": MAX_BATCH, "max_len": MAX_LEN, "precision": precision}
    if backend == "openvino":
        return bundle.build(BuildOptions(str(target), str(drafter), folder / "bundle", **sizes))
    options = double_options(target, drafter, folder / "bundle", backend=backend, prefill_chunk=CHUNK, **sizes)
    return build_for_double(options, folder / "graphs")


def double_options(target: object, drafter: object, out: Path, **fields: Any) -> BuildOptions:
    """Options of an fp32 build, which TensorRT itself does not offer: tests of equality need it."""
    with pytest.MonkeyPatch.context() as patch:
        for backend in build_options.PLAN_BACKENDS:
            patch.setitem(build_options.PRECISIONS, backend, ("fp32", "fp16"))
        return BuildOptions(str(target), str(drafter), out, **{"backend": "tensorrt", "precision": "fp32", **fields})


def build_for_double(options: BuildOptions, graphs: Path) -> Path:
    """The bundle of these options. graphs: a folder where the ONNX that its plans name stays."""

    def compile_plan(tensorrt: TensorRT, graph: Path, profiles: Sequence[ProfileSpec], plan: Path, **asked: Any) -> Any:
        kept = Path(shutil.move(graph, graphs / graph.name))
        shutil.move(f"{graph}.data", f"{kept}.data")
        inputs = read_inputs(kept, asked["precision"])
        dynamic = [value for value in inputs if any(isinstance(dim, str) for dim in value.dims)]
        shapes = [{value.name: value.shapes(profile) for value in dynamic} for profile in profiles]
        write_plan(plan, graph.stem, kept, shapes, [PLUGIN] * asked["plugins"])
        return PlanSpec(plan.name, plan.stat().st_size, 0.0, tuple(profiles))

    graphs.mkdir(parents=True, exist_ok=True)
    compiler = TensorRT(None, options.backend, VERSION, CAPABILITY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "_open_tensorrt", lambda options: compiler)
        patch.setattr(tensorrt_plans, "compile_plan", compile_plan)
        patch.setattr(tensorrt_plans, "register_pack", lambda tensorrt: None)
        return bundle.build(options)


def open_double(backend: str = "tensorrt", *, cuda_graphs: bool = True, free: int = 1 << 33) -> TensorRt:
    """A runtime on the double, with our plugin registered where it is needed."""
    double = make_double(VERSION)
    if backend == "tensorrt":
        double.registry.creators[PLUGIN] = object()
    return TensorRt(double, backend, HostDevice(free, compute_capability=CAPABILITY), cuda_graphs)


def open_engine(runtime: TensorRt, path: Path, policy: str | Policy = "plain", **fields: Any) -> Engine:
    """An engine on the double. fields: of EngineOptions."""
    manifest, options = read_manifest(path), EngineOptions(**{"prefill_chunk": 24, **fields})
    return Engine(
        *load_tensorrt(path, manifest, options, runtime),
        Tokenizer.load(path, manifest.tokenizer),
        make_policy(policy, None) if isinstance(policy, str) else policy,
        prefill_chunk=options.prefill_chunk,
    )


def write_checkpoint(directory: Path, config: Mapping[str, Any], shapes_of: Any, seed: int) -> None:
    """Random weights, large enough that attention decides; of a target, a head by which few tokens ever win."""
    directory.mkdir(parents=True)
    write_config(directory, config)
    shapes = drafter_shapes_of(config) if shapes_of is None else shapes_of(read_decoder_config(directory))
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes.items():
        drawn = rng.uniform(0.5, 1.5, shape) if "norm" in name else rng.normal(0, 1.2 / np.sqrt(shape[-1]), shape)
        arrays[name] = drawn.astype(np.float32)
    if "lm_head.weight" in arrays:
        arrays["lm_head.weight"][LIVELY:] *= 0.01
        arrays["lm_head.weight"][:LIVELY] *= 4
    write_safetensors(directory / "model.safetensors", arrays)
    (directory / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8")
