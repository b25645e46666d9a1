"""dcut-trt build: checkpoints in, an engine bundle out, published whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dcut_engines.build_inputs import (
    EMITTERS,
    SUFFIX,
    TOKENIZER,
    Inputs,
    TensorNames,
    describe,
    linear_slots,
    max_positions,
    tool_versions,
)
from dcut_engines.build_options import BuildOptions, check_against_target
from dcut_engines.build_progress import Report
from dcut_engines.checkpoint import TargetCheckpoint, load_target
from dcut_engines.digests import cached_sha256
from dcut_engines.drafter_checkpoint import DrafterCheckpoint, check_drafter_fits, load_drafter, read_draft_vocab
from dcut_engines.publish import exclusive, staged
from dcut_engines.sources import resolve_drafter, resolve_target
from dcut_engines.tensorrt_limits import check_networks
from dcut_trt import manifest as bundle_manifest
from dcut_trt.errors import BundleError
from dcut_trt.manifest import (
    MANIFEST_NAME,
    SCHEMA,
    FileSpec,
    PlanSpec,
)

if TYPE_CHECKING:
    from dcut_engines.tensorrt_build import TensorRT

# Opens one stage of a build by name and is left when the stage is done; may give a way to say how far it has come.
Progress = Callable[[str], AbstractContextManager[Report | None]]

CHAT_TEMPLATE = "chat_template.jinja"


@contextmanager
def silent(_stage: str) -> Iterator[Report | None]:
    """The Progress that shows nothing."""
    yield None


def build(options: BuildOptions, progress: Progress = silent) -> Path:
    """Build the bundle options.out, or find it there already built from the same inputs; returns its path.

    Raises UnknownModel, UnsupportedModel, DrafterMismatch or InvalidOption for what was asked, BundleError when
    options.out holds something that is not a bundle. Whatever is raised, options.out is as it was.
    """
    out = options.out.expanduser().resolve()
    tensorrt = _open_tensorrt(options) if options.makes_plans else None
    with progress("find the models"):
        target_source, drafter_source = resolve_target(options.target), resolve_drafter(options.drafter)
    with progress("read the checkpoints"):
        target, drafter = load_target(target_source), load_drafter(drafter_source)
        check_drafter_fits(drafter, target)
        check_against_target(options, target.config, drafter.config.block_size)
        if options.makes_plans:
            check_networks(options, target.config, drafter.config)
        inputs = Inputs(options, target, drafter, choose_draft_vocab(options, target, drafter), tensorrt)
        key = cache_key(inputs)
    _refuse_foreign(out)
    with exclusive(out):
        _refuse_foreign(out)
        if not _is_built(out, key):
            with staged(out) as staging:
                _write(staging, inputs, key, progress)
    return out


def _open_tensorrt(options: BuildOptions) -> TensorRT:
    from dcut_engines.tensorrt_build import open_tensorrt  # noqa: PLC0415  # other builds do without all of it

    return open_tensorrt(options)


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
    facts: dict[str, object] = {}
    if inputs.tensorrt is not None:
        import dcut_plugins  # noqa: PLC0415

        facts["plugins"] = _tree_sha256(Path(dcut_plugins.__file__).parent)
        options["prefill_chunk"] = inputs.options.longest_prefill
        options["compute_capability"] = inputs.tensorrt.compute_capability
    facts |= {
        "schema": SCHEMA,
        "target": [inputs.target.identity, inputs.target.sha256],
        "drafter": [inputs.drafter.identity, inputs.drafter.sha256],
        "draft_vocab": inputs.draft_vocab,
        "options": options,
        "emitters": _code_sha256(),
        "versions": tool_versions(inputs.tensorrt),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _code_sha256() -> str:
    return _tree_sha256(Path(__file__).parent)


def _tree_sha256(package: Path) -> str:
    """Over the names and contents of a package's sources."""
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cu")):
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
    tensors, plans = _write_networks(directory, inputs, progress)
    with progress("hash the bundle"):
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        files = {
            path.relative_to(directory).as_posix(): FileSpec(path.stat().st_size, bundle_manifest.file_sha256(path))
            for path in paths
        }
        manifest = describe(inputs, key, tensors, plans, files)
        (directory / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")


def _write_networks(
    directory: Path, inputs: Inputs, progress: Progress
) -> tuple[dict[str, TensorNames], dict[str, PlanSpec]]:
    if inputs.tensorrt is not None:
        from dcut_engines.tensorrt_plans import write_plans  # noqa: PLC0415  # other builds do without all of it

        return write_plans(directory, inputs, {"target": _emit_target, "drafter": _emit_drafter}, progress)
    with progress("write the target"):
        tensors = {"target": _emit_target(directory, inputs)}
    with progress("write the drafter"):
        tensors["drafter"] = _emit_drafter(directory, inputs)
    return tensors, {}


def _emit_target(directory: Path, inputs: Inputs) -> TensorNames:
    options, config = inputs.options, inputs.target.config
    form = EMITTERS[options.backend]
    emitter = importlib.import_module(f"dcut_engines.emit_{form}")
    written: TensorNames = emitter.emit_target(
        config=config,
        weights=inputs.target.weights,
        feature_layers=inputs.drafter.config.target_layer_ids,
        precision=options.precision,
        max_positions=max_positions(inputs),
        path=directory / f"target{SUFFIX[form]}",
        **({"max_len": linear_slots(inputs), "window": None} if form == "onnx" else {}),
    )
    return written


def _emit_drafter(directory: Path, inputs: Inputs) -> TensorNames:
    options, weights = inputs.options, inputs.target.weights
    form = EMITTERS[options.backend]
    emitter = importlib.import_module(f"dcut_engines.emit_{form}")
    embedding = weights["model.embed_tokens.weight"]
    head = embedding if inputs.target.config.tie_word_embeddings else weights["lm_head.weight"]
    ids: NDArray[np.int32] | None = None
    if inputs.draft_vocab is not None:
        ids = np.array(inputs.draft_vocab, dtype=np.int32)
        head = head[ids]
    written: TensorNames = emitter.emit_drafter(
        config=inputs.drafter.config,
        weights=inputs.drafter.weights,
        embedding=embedding,
        head=head,
        draft_vocab=ids,
        precision=options.precision,
        max_positions=max_positions(inputs),
        path=directory / f"drafter{SUFFIX[form]}",
        **({"max_len": linear_slots(inputs)} if form == "onnx" else {}),
    )
    return written
