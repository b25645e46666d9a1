"""A DFlash drafter checkpoint, and the checks that it was trained for the target it is given."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcut_engines.checkpoint import TargetCheckpoint
from dcut_engines.digests import files_sha256
from dcut_engines.hf_config import Fields, read_json, read_rope, refuse_options
from dcut_engines.model_config import DecoderConfig, DrafterConfig, Weights
from dcut_engines.safetensors_file import read_tensors, weight_files
from dcut_engines.sources import Source
from dcut_engines.weights import LazyWeights, check_heads, check_shapes, drafter_shapes
from dcut_trt.errors import DrafterMismatch, UnknownModel

DRAFT_VOCAB_FILE = "draft_vocab.json"
FLASH_FIELDS = {"causal", "mask_token_id", "target", "target_layer_ids"}
MAX_BLOCK_SIZE = 64
SHORT = 12  # hex digits of a hash that a message shows


@dataclass(frozen=True, slots=True)
class TargetPin:
    """What a drafter's config says of its target: dflash_config.target. Absent fields pin nothing.

    sha256 is over the target's files; tokenizer_sha256 over its (id, token) pairs (TokenizerFiles.vocabulary_sha256).
    """

    name: str | None
    sha256: str | None
    tokenizer_sha256: str | None


@dataclass(frozen=True, slots=True)
class DrafterCheckpoint:
    """draft_vocab: target ids whose head rows the drafter may propose, or None for all."""

    identity: str
    sha256: str
    config: DrafterConfig
    weights: Weights
    draft_vocab: tuple[int, ...] | None
    pin: TargetPin


def load_drafter(source: Source) -> DrafterCheckpoint:
    """Read a DFlash checkpoint directory.

    Raises UnknownModel when files are missing, truncated or inconsistent, UnsupportedModel for an option not served.
    """
    path = source.path / "config.json"
    fields = _read_fields(path)
    config = read_drafter_config(source.path)
    tensors = read_tensors(source.path)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_shapes(str(source.path), drafter_shapes(config), shapes)
    vocab_path = source.path / DRAFT_VOCAB_FILE
    optional = [vocab_path] if vocab_path.is_file() else []
    return DrafterCheckpoint(
        identity=source.identity,
        sha256=files_sha256([path, *optional, *weight_files(source.path)]),
        config=config,
        weights=LazyWeights(shapes, lambda name: tensors[name].read()),
        draft_vocab=read_draft_vocab(vocab_path, config.vocab_size) if optional else None,
        pin=_read_pin(fields.section("dflash_config").section("target")),
    )


def read_drafter_config(directory: Path) -> DrafterConfig:
    """The architecture alone, from DIRECTORY/config.json. Raises as load_drafter."""
    path = directory / "config.json"
    config = _read_config(_read_fields(path))
    check_heads(str(path), config)
    return config


def dimension_pairs(drafter: DrafterConfig, target: DecoderConfig) -> list[tuple[str, Any, Any]]:
    """What must be equal in both architectures: name of the field, the drafter's value, the target's."""
    return [
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
        ("num_target_layers", drafter.num_target_layers, target.layers),
    ]


def check_drafter_fits(drafter: DrafterCheckpoint, target: TargetCheckpoint) -> None:
    """Raise DrafterMismatch, naming both and the first field that differs, unless drafter was made for target."""
    config, pin = drafter.config, drafter.pin
    wanted: list[tuple[str, Any, Any]] = [
        *dimension_pairs(config, target.config),
        ("target sha256", pin.sha256, target.sha256),
        ("tokenizer sha256", pin.tokenizer_sha256, target.tokenizer.vocabulary_sha256),
    ]
    both = (
        f"drafter {drafter.identity} ({drafter.sha256[:SHORT]})"
        f"{f', trained for {pin.name},' if pin.name else ''} does not fit "
        f"target {target.identity} ({target.sha256[:SHORT]})"
    )
    for field, of_drafter, of_target in wanted:
        if of_drafter is not None and of_drafter != of_target:
            raise DrafterMismatch(f"{both}: {field} is {of_drafter} for the drafter, {of_target} for the target")


def read_draft_vocab(path: Path, vocab_size: int) -> tuple[int, ...]:
    """Distinct target ids from a JSON list, ascending. Raises UnknownModel naming the first bad entry."""
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownModel(f"draft vocabulary {path} cannot be read: {error}") from error
    if not isinstance(ids, list) or not ids:
        raise UnknownModel(f"draft vocabulary {path}: a non-empty JSON list of token ids is needed")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise UnknownModel(f"draft vocabulary {path}: {token!r} is not a token id in [0, {vocab_size})")
    if len(set(ids)) != len(ids):
        raise UnknownModel(f"draft vocabulary {path}: {len(ids) - len(set(ids))} ids are there twice")
    return tuple(sorted(ids))


def _read_fields(path: Path) -> Fields:
    fields = Fields(path, read_json(path))
    if "dflash_config" not in fields.values:
        raise UnknownModel(f"{path}: dflash_config is missing; this is not a DFlash drafter")
    return fields


def _read_config(fields: Fields) -> DrafterConfig:
    refuse_options(fields)
    flash = fields.section("dflash_config")
    for name in sorted(flash.values.keys() - FLASH_FIELDS):
        flash.unsupported(name, f"supported are {', '.join(sorted(FLASH_FIELDS))}")
    heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    vocab_size, target_layers = fields.integer("vocab_size"), fields.integer("num_target_layers")
    block_size = fields.integer("block_size", minimum=2)
    if block_size > MAX_BLOCK_SIZE:
        fields.refuse("block_size", f"at most {MAX_BLOCK_SIZE}")
    mask_token_id = flash.integer("mask_token_id", minimum=0)
    if mask_token_id >= vocab_size:
        flash.refuse("mask_token_id", f"vocab_size is {vocab_size}")
    layer_ids = flash.get("target_layer_ids")
    if not isinstance(layer_ids, list) or not layer_ids or len(set(layer_ids)) != len(layer_ids):
        flash.refuse("target_layer_ids", "a list of distinct layers is needed")
    if not all(isinstance(layer, int) and 0 <= layer < target_layers for layer in layer_ids):
        flash.refuse("target_layer_ids", f"the target has layers 0 to {target_layers - 1} (num_target_layers)")
    return DrafterConfig(
        layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden_size // heads),
        vocab_size=vocab_size,
        rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope=read_rope(fields),
        attention_bias=fields.boolean("attention_bias", False),
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(layer_ids),
        num_target_layers=target_layers,
        causal=flash.boolean("causal", False),
    )


def _read_pin(fields: Fields) -> TargetPin:
    for name in ("name", "sha256", "tokenizer_sha256"):
        if not isinstance(fields.get(name, ""), str):
            fields.refuse(name, "a string is needed")
    return TargetPin(fields.get("name"), fields.get("sha256"), fields.get("tokenizer_sha256"))
