"""config.json of a Hugging Face checkpoint, read strictly: a field we do not honour is refused, not ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from dcut_engines.model_config import DecoderConfig, RopeConfig
from dcut_trt.errors import UnknownModel, UnsupportedModel

ARCHITECTURES: Mapping[str, Literal["llama", "qwen3"]] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
# Fields of each rope kind, by both of the names they have had; another field would change the frequencies unseen.
ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"},
}
ROPE_COMMON = {"rope_type", "type", "rope_theta"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UnknownModel when it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnknownModel(f"{path.parent}: {path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnknownModel(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnknownModel(f"{path}: a JSON object is needed, not {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object of a config file, checked for type and range as it is read."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.refuse(name, f"an integer of at least {minimum} is needed")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            self.refuse(name, "a positive number is needed")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false is needed")
        return value

    def section(self, name: str) -> Fields:
        value = self.get(name, {})
        if not isinstance(value, dict):
            self.refuse(name, "an object is needed")
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def only(self, name: str, *allowed: object) -> None:
        """Raise UnsupportedModel unless the field is absent, null or one of `allowed`."""
        if self.get(name) is not None and self.get(name) not in allowed:
            wanted = " or ".join(repr(value) for value in allowed) or "null"
            self.unsupported(name, f"only {wanted} is supported")

    def refuse(self, name: str, why: str) -> NoReturn:
        raise UnknownModel(f"{self.path}: {self.prefix}{name}={self.values.get(name)!r}: {why}")

    def unsupported(self, name: str, why: str) -> NoReturn:
        raise UnsupportedModel(f"{self.path}: {self.prefix}{name}={self.values.get(name)!r}: {why}")


def read_decoder_config(directory: Path) -> DecoderConfig:
    """The architecture of a Llama or dense Qwen3 target from DIRECTORY/config.json.

    Raises UnknownModel for a missing or senseless field, UnsupportedModel naming field and value of an architecture or
    option that is not served.
    """
    path = directory / "config.json"
    fields = Fields(path, read_json(path))
    names = fields.get("architectures", [])
    architecture = ARCHITECTURES.get(str(names[0])) if isinstance(names, list) and len(names) == 1 else None
    if architecture is None:
        fields.unsupported("architectures", f"supported are {', '.join(ARCHITECTURES)}")
    refuse_options(fields)
    heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    # Qwen3's head size is its own constant; Llama's follows from the hidden size.
    head_dim = fields.integer("head_dim", 128 if architecture == "qwen3" else hidden_size // heads)
    return DecoderConfig(
        architecture=architecture,
        layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_position=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope=read_rope(fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean("attention_bias", False),
        qk_norm=architecture == "qwen3",
    )


def refuse_options(fields: Fields) -> None:
    """Refuse every option of a Llama or Qwen3 config that would change what the network computes."""
    fields.only("quantization_config")
    fields.only("hidden_act", "silu")
    fields.only("mlp_bias", False)
    fields.only("use_sliding_window", False)
    fields.only("num_experts", 0)
    fields.only("num_local_experts", 0)
    fields.only("partial_rotary_factor", 1.0)
    layer_types = fields.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        fields.unsupported("layer_types", "only full_attention is supported")
    if "use_sliding_window" not in fields.values:
        fields.only("sliding_window")


def read_rope(fields: Fields) -> RopeConfig:
    """The rotary embedding from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    scaling = fields.section(name)
    theta = (fields if scaling.get("rope_theta") is None else scaling).real("rope_theta", 10000.0)
    key = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = scaling.get(key, "default")
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        scaling.unsupported(key, f"supported are {', '.join(ROPE_FIELDS)}")
    scaling.only("partial_rotary_factor", 1.0)
    known = ROPE_COMMON | ROPE_FIELDS[kind] | {"partial_rotary_factor"}
    for extra in sorted(name for name, value in scaling.values.items() if name not in known and value is not None):
        scaling.unsupported(extra, f"not an option of rope kind {kind!r}")
    factor = scaling.real("factor", None if ROPE_FIELDS[kind] else 1.0)
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            factor,
            scaling.integer("original_max_position_embeddings"),
            scaling.real("low_freq_factor"),
            scaling.real("high_freq_factor"),
        )
    if kind == "yarn":
        return RopeConfig(
            theta,
            "yarn",
            factor,
            scaling.integer("original_max_position_embeddings", fields.get("max_position_embeddings")),
            beta_fast=scaling.real("beta_fast", 32.0),
            beta_slow=scaling.real("beta_slow", 1.0),
            attention_factor=scaling.real("attention_factor") if scaling.get("attention_factor") else None,
        )
    return RopeConfig(theta, "linear", factor) if kind == "linear" else RopeConfig(theta)
