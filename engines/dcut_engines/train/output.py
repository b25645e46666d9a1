"""A trained drafter as a DFlash checkpoint directory: config, weights, draft vocabulary, curve and card."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dcut_engines.digests import write_atomic
from dcut_engines.drafter_checkpoint import DRAFT_VOCAB_FILE
from dcut_engines.model_config import DrafterConfig, RopeConfig
from dcut_engines.train.drafting import TorchDrafter
from dcut_engines.train.evaluate import Acceptance
from dcut_engines.train.training import Point


def write_drafter(
    folder: Path, drafter: TorchDrafter, draft_vocab: tuple[int, ...] | None, max_position: int, pin: dict[str, str]
) -> None:
    """Write config.json, model.safetensors in bf16 and, where drafts come from a part of the head, draft_vocab.json.

    pin: dflash_config.target, what the drafter was trained for.
    """
    from safetensors.torch import save  # noqa: PLC0415 - an extra of its own

    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.json", json.dumps(dflash_config(drafter.config, max_position, pin), indent=2) + "\n")
    if draft_vocab is not None:
        write_atomic(folder / DRAFT_VOCAB_FILE, json.dumps(list(draft_vocab)))
    rounded = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in drafter.trained.items()}
    scratch = folder / ".model.safetensors"
    scratch.write_bytes(save(rounded))
    scratch.replace(folder / "model.safetensors")


def dflash_config(config: DrafterConfig, max_position: int, pin: dict[str, str]) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_hidden_layers": config.layers,
        "num_target_layers": config.num_target_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **rope_fields(config.rope),
        "max_position_embeddings": max_position,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention"] * config.layers,
        "torch_dtype": "bfloat16",
        "dflash_config": {
            "causal": config.causal,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "target": pin,
        },
    }


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """rope_theta and, for a scaled embedding, rope_scaling with the fields of its kind."""
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
    return {"rope_theta": rope.theta} | ({} if rope.kind == "default" else {"rope_scaling": scaling})


def write_curve(folder: Path, curve: Sequence[Point]) -> None:
    """curve.csv, one row per evaluation."""
    scratch = folder / ".curve.csv"
    with scratch.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(Point.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(point) for point in curve)
    scratch.replace(folder / "curve.csv")


def write_card(folder: Path, facts: dict[str, Any], measured: dict[str, Acceptance], curve: Sequence[Point]) -> None:
    """README.md and training.json: what it is, what it was trained on, and how good it was before and after."""
    document = {"facts": facts, "measured": {name: asdict(of) for name, of in measured.items()}}
    write_atomic(folder / "training.json", json.dumps(document, indent=1) + "\n")
    depth = len(next(iter(measured.values())).accuracy)
    offsets = " ".join(str(offset) for offset in range(1, min(depth, 4) + 1))
    lines = [
        f"# A DFlash drafter for {facts['target']}",
        "",
        f"`dcut-trt build --target {facts['target']} --drafter DIR --out BUNDLE`, DIR being this directory.",
        "",
        f"| held out, never trained on | tau | tau as decoded | token accuracy at offset {offsets} | blocks |",
        "|---|---|---|---|---|",
        *(_row(name, acceptance) for name, acceptance in measured.items()),
        "",
        "tau is the tokens of a step: accepted drafts + 1, averaged over every response position; as decoded, over the",
        "positions that decoding stops at. curve.csv has the way there, training.json all figures.",
        "",
        "| trained with | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        f"| steps, blocks, minutes | {curve[-1].step}, {curve[-1].blocks}, {curve[-1].minutes:.1f} |",
    ]
    write_atomic(folder / "README.md", "\n".join(lines) + "\n")


def _row(name: str, acceptance: Acceptance) -> str:
    decoded = "" if acceptance.decoded_tau is None else f"{acceptance.decoded_tau:.2f}"
    accuracy = " ".join(f"{share:.2f}".lstrip("0") for share in acceptance.accuracy[:4])
    return f"| {name} | {acceptance.tau:.2f} | {decoded} | {accuracy} | {acceptance.blocks} |"
