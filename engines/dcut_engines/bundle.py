"""dcut-trt build: checkpoints in, an engine bundle out, published whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dcut_engines.build_options import BuildOptions, check_against_target
from dcut_engines.checkpoint import TargetCheckpoint, load_target
from dcut_engines.digests import cached_sha256
from dcut_engines.drafter_checkpoint import DrafterCheckpoint, check_drafter_fits, load_drafter, read_draft_vocab
from dcut_engines.publish import exclusive, staged
from dcut_engines.sources import resolve_drafter, resolve_target
from dcut_trt import manifest as bundle_manifest
from dcut_trt.errors import BundleError
from dcut_trt.manifest import MANIFEST_NAME, SCHEMA, DrafterSpec, FileSpec, Manifest, TargetSpec, TokenizerSpec
from dcut_trt.spec.packing import captured_batches, token_buckets

# Opens one stage of a build by name and is left when the stage is done.
Progress = Callable[[str], AbstractContextManager[None]]

TOKENIZER, CHAT_TEMPLATE = "tokenizer.json", "chat_template.jinja"
SUFFIX = {"openvino": ".xml", "onnx": ".onnx"}
TOOLS = ("dcut-trt", "gguf", "numpy", "onnx", "openvino", "tokenizers")


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Everything a bundle is made from. draft_vocab: ascending target ids, or None for all."""

    options: BuildOptions
    target: TargetCheckpoint
    drafter: DrafterCheckpoint
    draft_vocab: tuple[int, ...] | None

    @property
    def draft_vocab_size(self) -> int:
        return self.target.config.vocab_size if self.draft_vocab is None else len(self.draft_vocab)


@contextmanager
def silent(_stage: str) -> Iterator[None]:
    """The Progress that shows nothing."""
    yield


def build(options: BuildOptions, progress: Progress = silent) -> Path:
    """Build the bundle options.out, or find it there already built from the same inputs; returns its path.

    Raises UnknownModel, UnsupportedModel, DrafterMismatch or InvalidOption for what was asked, BundleError when
    options.out holds something that is not a bundle. Whatever is raised, options.out is as it was.
    """
    out = options.out.expanduser().resolve()
    with progress("find the models"):
        target_source, drafter_source = resolve_target(options.target), resolve_drafter(options.drafter)
    with progress("read the checkpoints"):
        target, drafter = load_target(target_source), load_drafter(drafter_source)
        check_drafter_fits(drafter, target)
        check_against_target(options, target.config, drafter.config.block_size)
        inputs = Inputs(options, target, drafter, choose_draft_vocab(options, target, drafter))
        key = cache_key(inputs)
    _refuse_foreign(out)
    with exclusive(out):
        _refuse_foreign(out)
        if not _is_built(out, key):
            with staged(out) as staging:
                _write(staging, inputs, key, progress)
    return out


def choose_draft_vocab(
    options: BuildOptions, target: TargetCheckpoint, drafter: DrafterCheckpoint
) -> tuple[int, ...] | None:
    """The target ids that drafts may be made of, ascending, or None for the whole vocabulary."""
    vocab_size = target.config.vocab_size
    match options.draft_vocab:
        case "own":
            chosen = drafter.draft_vocab
        case "all":
            chosen = None
        case int(count):
            chosen = tuple(sorted({*range(count), *target.tokenizer.eos_ids}))
        case path:
            chosen = read_draft_vocab(path.expanduser(), vocab_size)
    return None if chosen is not None and len(chosen) == vocab_size else chosen


def cache_key(inputs: Inputs) -> str:
    """Hex sha256 over the contents of all inputs, the options that shape the bundle, and the code that writes it."""
    options = dataclasses.asdict(inputs.options)
    for name in ("target", "drafter", "out", "draft_vocab"):
        del options[name]
    options["ratios"] = sorted(inputs.options.ratios)
    facts = {
        "schema": SCHEMA,
        "target": [inputs.target.identity, inputs.target.sha256],
        "drafter": [inputs.drafter.identity, inputs.drafter.sha256],
        "draft_vocab": inputs.draft_vocab,
        "options": options,
        "emitters": _code_sha256(),
        "versions": tool_versions(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def tool_versions() -> dict[str, str]:
    """Versions of the packages that shape a bundle; one that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in TOOLS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _code_sha256() -> str:
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _refuse_foreign(out: Path) -> None:
    """Raise BundleError unless out is missing, empty, or a bundle of any version."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        manifest = json.loads((out / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict) or not {"schema", "key", "files"} <= manifest.keys():
        raise BundleError(f"{out} is there and is not an engine bundle; name another --out, or remove it first")


def _is_built(out: Path, key: str) -> bool:
    """Whether out already is this very build, with none of its files altered since."""
    try:
        manifest = bundle_manifest.read_manifest(out)
    except BundleError:
        return False
    return manifest.key == key and all(
        (out / name).is_file() and (out / name).stat().st_size == spec.size and cached_sha256(out / name) == spec.sha256
        for name, spec in manifest.files.items()
    )


def _write(directory: Path, inputs: Inputs, key: str, progress: Progress) -> None:
    tokenizer = inputs.target.tokenizer
    (directory / TOKENIZER).write_text(tokenizer.tokenizer_json, encoding="utf-8")
    if tokenizer.chat_template is not None:
        (directory / CHAT_TEMPLATE).write_text(tokenizer.chat_template, encoding="utf-8")
    with progress("write the target"):
        tensors = {"target": _emit_target(directory, inputs)}
    with progress("write the drafter"):
        tensors["drafter"] = _emit_drafter(directory, inputs)
    with progress("hash the bundle"):
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        files = {
            path.relative_to(directory).as_posix(): FileSpec(path.stat().st_size, bundle_manifest.file_sha256(path))
            for path in paths
        }
        manifest = describe(inputs, key, tensors, files)
        (directory / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")


def _emit_target(directory: Path, inputs: Inputs) -> dict[str, list[str]]:
    options, config = inputs.options, inputs.target.config
    emitter = importlib.import_module(f"dcut_engines.emit_{options.backend}")
    written: dict[str, list[str]] = emitter.emit_target(
        config=config,
        weights=inputs.target.weights,
        feature_layers=inputs.drafter.config.target_layer_ids,
        precision=options.precision,
        max_positions=max_positions(inputs),
        path=directory / f"target{SUFFIX[options.backend]}",
        **({"max_len": max_positions(inputs), "window": None} if options.backend == "onnx" else {}),
    )
    return written


def _emit_drafter(directory: Path, inputs: Inputs) -> dict[str, list[str]]:
    options, weights = inputs.options, inputs.target.weights
    emitter = importlib.import_module(f"dcut_engines.emit_{options.backend}")
    embedding = weights["model.embed_tokens.weight"]
    head = embedding if inputs.target.config.tie_word_embeddings else weights["lm_head.weight"]
    ids: NDArray[np.int32] | None = None
    if inputs.draft_vocab is not None:
        ids = np.array(inputs.draft_vocab, dtype=np.int32)
        head = head[ids]
    written: dict[str, list[str]] = emitter.emit_drafter(
        config=inputs.drafter.config,
        weights=inputs.drafter.weights,
        embedding=embedding,
        head=head,
        draft_vocab=ids,
        precision=options.precision,
        max_positions=max_positions(inputs),
        path=directory / f"drafter{SUFFIX[options.backend]}",
        **({"max_len": max_positions(inputs)} if options.backend == "onnx" else {}),
    )
    return written


def max_positions(inputs: Inputs) -> int:
    """Rows of the rotary tables: a block may start at the last position of a request."""
    return inputs.options.max_len + inputs.drafter.config.block_size


def describe(
    inputs: Inputs, key: str, tensors: dict[str, dict[str, list[str]]], files: dict[str, FileSpec]
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
        versions=tool_versions(),
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
