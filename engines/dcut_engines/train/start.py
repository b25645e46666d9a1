"""Where a training starts: from a drafter that exists, or from the target's own last layers."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcut_engines.build_options import InvalidOption
from dcut_engines.checkpoint import TargetCheckpoint
from dcut_engines.drafter_checkpoint import check_drafter_fits, load_drafter
from dcut_engines.model_config import DecoderConfig, DrafterConfig, Weights
from dcut_engines.sources import resolve_drafter
from dcut_engines.train.options import DEFAULT_BLOCK, DEFAULT_LAYERS, TrainOptions
from dcut_engines.weights import drafter_shapes

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Start:
    """identity: of the drafter that is continued, or None.  draft_vocab: its own ids, None for all or without one.

    target_name: what the config will say that the drafter was trained for.
    """

    config: DrafterConfig
    weights: Weights
    identity: str | None
    draft_vocab: tuple[int, ...] | None
    target_name: str


def start_from(options: TrainOptions, target: TargetCheckpoint) -> Start:
    """Raises InvalidOption, and what load_drafter and check_drafter_fits raise for options.init."""
    if options.max_len > target.config.max_position:
        raise InvalidOption("--max-len", options.max_len, f"the model's context is {target.config.max_position}")
    if options.init is not None:
        drafter = load_drafter(resolve_drafter(options.init))
        check_drafter_fits(drafter, target)
        name = drafter.pin.name or target.identity
        return Start(drafter.config, drafter.weights, drafter.identity, drafter.draft_vocab, name)
    layers = options.layers or DEFAULT_LAYERS
    if layers > target.config.layers:
        raise InvalidOption("--layers", layers, f"the target has {target.config.layers}")
    config = fresh_config(target, layers, options.block or DEFAULT_BLOCK, causal=options.attention != "bidirectional")
    return Start(config, fresh_weights(config, target, options.seed), None, None, target.identity)


def fresh_config(target: TargetCheckpoint, layers: int, block_size: int, *, causal: bool) -> DrafterConfig:
    """Layers shaped as the target's, reading as many of them as the drafter has."""
    of_target = target.config
    return DrafterConfig(
        layers=layers,
        hidden_size=of_target.hidden_size,
        intermediate_size=of_target.intermediate_size,
        heads=of_target.heads,
        kv_heads=of_target.kv_heads,
        head_dim=of_target.head_dim,
        vocab_size=of_target.vocab_size,
        rms_norm_eps=of_target.rms_norm_eps,
        rope=of_target.rope,
        attention_bias=of_target.attention_bias,
        block_size=block_size,
        mask_token_id=mask_token(target),
        target_layer_ids=feature_layers(of_target, layers),
        num_target_layers=of_target.layers,
        causal=causal,
    )


def feature_layers(target: DecoderConfig, count: int) -> tuple[int, ...]:
    """`count` layers spread evenly from the second to the third last, DFlash's choice; fewer where they coincide."""
    first, last = min(1, target.layers - 1), max(target.layers - 3, min(1, target.layers - 1))
    return tuple(sorted({int(layer) for layer in np.linspace(first, last, count).round()}))


def mask_token(target: TargetCheckpoint) -> int:
    """A special token that neither begins nor ends anything: the one whose name says mask or reserved, or the last."""
    added = json.loads(target.tokenizer.tokenizer_json).get("added_tokens", [])
    taken = {target.tokenizer.bos_id, *target.tokenizer.eos_ids}
    special = {entry["id"]: entry["content"] for entry in added if entry["special"] and entry["id"] not in taken}
    named = [token for token, name in special.items() if "mask" in name.lower() or "reserved" in name.lower()]
    return int((named or sorted(special) or [target.config.vocab_size - 1])[-1])


def fresh_weights(config: DrafterConfig, target: TargetCheckpoint, seed: int) -> dict[str, FloatArray]:
    """The target's last layers; the context is the last listed layer's features, with a little of the others'.

    That layer is what the target's own next layers read, so their key and value projections mean something from the
    first step on. Only their norm has to move into hidden_norm, since a drafter does not norm context per layer.
    """
    rng, hidden = np.random.default_rng(seed), config.hidden_size
    first = target.config.layers - config.layers
    weights: dict[str, FloatArray] = {}
    for name, shape in drafter_shapes(config).items():
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            source = f"model.layers.{first + int(layer)}.{rest}"
            if source in target.weights:
                weights[name] = target.weights[source]
                continue
        weights[name] = np.ones(shape, np.float32)
    norms = [target.weights[f"model.layers.{first + layer}.input_layernorm.weight"] for layer in range(config.layers)]
    projection = rng.normal(0.0, 0.02 / np.sqrt(hidden), weights["fc.weight"].shape)
    projection[:, -hidden:] += np.eye(hidden)
    return weights | {
        "fc.weight": projection.astype(np.float32),
        "hidden_norm.weight": np.mean(norms, axis=0).astype(np.float32),
        "norm.weight": target.weights["model.norm.weight"],
    }
