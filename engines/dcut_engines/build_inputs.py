"""What a bundle is made from, and the manifest that says so."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from dcut_engines.build_options import PLAN_BACKENDS, BuildOptions
from dcut_engines.checkpoint import TargetCheckpoint
from dcut_engines.drafter_checkpoint import DrafterCheckpoint
from dcut_engines.tensorrt_profiles import cache_slots
from dcut_trt.manifest import SCHEMA, DrafterSpec, FileSpec, Manifest, PlanSpec, TargetSpec, TokenizerSpec
from dcut_trt.spec.packing import captured_batches, token_buckets

if TYPE_CHECKING:
    from dcut_engines.tensorrt_build import TensorRT

TOKENIZER = "tokenizer.json"
# What a backend's graphs are written as; the TensorRT backends compile them on from there.
EMITTERS = {"openvino": "openvino", **dict.fromkeys(("onnx", *PLAN_BACKENDS), "onnx")}
SUFFIX = {"openvino": ".xml", "onnx": ".onnx"}
TOOLS = ("dcut-trt", "gguf", "numpy", "onnx", "openvino", "tokenizers")

TensorNames = dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything a bundle is made from. draft_vocab: ascending target ids, or None for all.

    tensorrt: the compiler of a TensorRT backend.
    """

    options: BuildOptions
    target: TargetCheckpoint
    drafter: DrafterCheckpoint
    draft_vocab: tuple[int, ...] | None
    tensorrt: TensorRT | None = None

    @property
    def draft_vocab_size(self) -> int:
        return self.target.config.vocab_size if self.draft_vocab is None else len(self.draft_vocab)


def tool_versions(tensorrt: TensorRT | None) -> dict[str, str]:
    """Versions of the packages that shape a bundle; one that is not installed is left out."""
    found = {"python": platform.python_version()}
    if tensorrt is not None:
        found[tensorrt.backend] = tensorrt.version
    for name in TOOLS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def max_positions(inputs: Inputs) -> int:
    """Rows of the rotary tables: a block may start at the last position of a request."""
    return inputs.options.max_len + inputs.drafter.config.block_size


def linear_slots(inputs: Inputs) -> int:
    """S_max, the positions per request of a linear KV cache; 0 where the cache is paged."""
    options, block_size = inputs.options, inputs.drafter.config.block_size
    if EMITTERS[options.backend] != "onnx":
        return 0
    return cache_slots(options.max_len, block_size) if options.makes_plans else max_positions(inputs)


def describe(
    inputs: Inputs,
    key: str,
    tensors: dict[str, TensorNames],
    plans: dict[str, PlanSpec],
    files: dict[str, FileSpec],
) -> Manifest:
    """The manifest of a bundle made from these inputs."""
    options, target, drafter = inputs.options, inputs.target, inputs.drafter
    tokenizer, batches = target.tokenizer, captured_batches(options.max_batch)
    return Manifest(
        schema=SCHEMA,
        key=key,
        backend=options.backend,
        precision=options.precision,
        target=_target_spec(target),
        drafter=_drafter_spec(drafter, inputs.draft_vocab_size),
        tokenizer=TokenizerSpec(files[TOKENIZER].sha256, tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids),
        draft_length=drafter.config.draft_length,
        ratios=tuple(sorted(options.ratios)),
        captured_batches=batches,
        token_buckets=token_buckets(options.ratios, batches, drafter.config.block_size),
        max_batch=options.max_batch,
        max_len=options.max_len,
        tensors=tensors,
        files=files,
        versions=tool_versions(inputs.tensorrt),
        plans=plans,
        tensorrt=inputs.tensorrt.version if inputs.tensorrt else None,
        compute_capability=inputs.tensorrt.compute_capability if inputs.tensorrt else None,
        cache_slots=linear_slots(inputs),
        prefill_chunk=options.longest_prefill if inputs.tensorrt else 0,
    )


def _target_spec(target: TargetCheckpoint) -> TargetSpec:
    config = target.config
    return TargetSpec(
        identity=target.identity,
        sha256=target.sha256,
        architecture=config.architecture,
        layers=config.layers,
        hidden_size=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
    )


def _drafter_spec(drafter: DrafterCheckpoint, draft_vocab_size: int) -> DrafterSpec:
    config = drafter.config
    return DrafterSpec(
        identity=drafter.identity,
        sha256=drafter.sha256,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layer_ids,
        causal=config.causal,
        draft_vocab_size=draft_vocab_size,
    )
