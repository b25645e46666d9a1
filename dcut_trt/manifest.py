"""The bundle's manifest.json: what an engine bundle holds, for which model and machine, and how to check it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from dcut_trt.errors import BundleError
from dcut_trt.typed_json import from_json

SCHEMA = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """The target network. sha256 is over the checkpoint's files, identity is what a person calls it."""

    identity: str
    sha256: str
    architecture: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """The DFlash drafter. block_size = D + 1; target_layer_ids are 0-based; draft_vocab_size counts head rows."""

    identity: str
    sha256: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    causal: bool
    draft_vocab_size: int


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """sha256 of tokenizer.json, and the ids that end a sequence. bos_id is None when the model has none."""

    sha256: str
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileSpec:
    """Size in bytes and sha256 of one file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """One optimization profile of a plan: (min, opt, max) of every dynamic dimension, by its name in docs/graphs.md.

    kind: "verify", "decode" or "prefill" of the target; "draft" or "prefill" of the drafter.
    """

    name: str
    kind: str
    dims: dict[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """One TensorRT plan. file: in the bundle.  size: bytes.  profiles: by their index in the engine."""

    file: str
    size: int
    build_seconds: float
    profiles: tuple[ProfileSpec, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything the runtime may know about a bundle without opening its graphs.

    backend: "openvino", "onnx", "tensorrt" or "tensorrt-rtx".  precision: "fp32", "fp16" or "bf16".  draft_length: D.
    ratios: fractions of B * (D + 1) the engines were laid out for.
    token_buckets: distinct K over captured_batches and ratios.
    tensors: graph name -> {"inputs": [...], "outputs": [...]}.  files: path inside the bundle -> size and sha256.
    key: content hash of all build inputs and options.  versions: of the tools that built it.
    cache_slots: positions per request in a linear KV cache, S_max; 0 for a paged one.
    Of TensorRT bundles only: plans by graph name, the TensorRT version and the compute capability they were built for,
    and prefill_chunk, the longest prefill their profiles take.
    """

    schema: int
    key: str
    backend: str
    precision: str
    target: TargetSpec
    drafter: DrafterSpec
    tokenizer: TokenizerSpec
    draft_length: int
    ratios: tuple[float, ...]
    captured_batches: tuple[int, ...]
    token_buckets: tuple[int, ...]
    max_batch: int
    max_len: int
    tensors: dict[str, dict[str, list[str]]]
    files: dict[str, FileSpec]
    versions: dict[str, str]
    plans: dict[str, PlanSpec] = field(default_factory=dict)
    tensorrt: str | None = None
    compute_capability: str | None = None
    cache_slots: int = 0
    prefill_chunk: int = 0

    @property
    def feature_size(self) -> int:
        """F, the width of a target feature row: the drafter's layers of the target, side by side."""
        return len(self.drafter.target_layer_ids) * self.target.hidden_size

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(bundle: Path) -> Manifest:
    """Parse BUNDLE/manifest.json without touching the graphs.

    Raises BundleError when it is missing, not JSON, of another schema, or lacks a field.
    """
    path = bundle / MANIFEST_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BundleError(f"{bundle} is not an engine bundle: {MANIFEST_NAME} is missing") from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        raise BundleError(f"{path}: schema {found!r}; this version reads schema {SCHEMA}. Rebuild with: dcut-trt build")
    try:
        manifest = from_json(Manifest, raw)
    except (ValueError, OverflowError) as error:
        raise BundleError(f"{path}: malformed manifest: {error}") from error
    for name in (*manifest.files, *(plan.file for plan in manifest.plans.values())):
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
            raise BundleError(f"{path}: malformed manifest: file {name!r} is not inside the bundle")
    return manifest


def verify_files(bundle: Path, manifest: Manifest) -> None:
    """Check size and sha256 of every listed file before anything loads it.

    Raises BundleError naming the first file that is missing, truncated or altered.
    """
    for name, spec in manifest.files.items():
        path = bundle / name
        if not path.is_file():
            raise BundleError(f"{bundle}: {name} is missing")
        size = path.stat().st_size
        if size != spec.size:
            raise BundleError(f"{bundle}: {name} has {size} bytes, the manifest says {spec.size}")
        digest = file_sha256(path)
        if digest != spec.sha256:
            raise BundleError(f"{bundle}: {name} has sha256 {digest}, the manifest says {spec.sha256}")
