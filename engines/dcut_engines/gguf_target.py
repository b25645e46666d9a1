"""A Llama or Qwen3 target out of a GGUF file: its config and its weights under their Hugging Face names."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcut_engines.gguf_file import GgufFile
from dcut_engines.model_config import DecoderConfig, RopeConfig
from dcut_engines.weights import LazyWeights, Shape, check_shapes, decoder_shapes
from dcut_trt.errors import UnknownModel, UnsupportedModel

ROPE_FREQUENCIES = "rope_freqs.weight"
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Llama 3 stores its rope scaling as one factor per frequency, always made from these three numbers.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}


def read_gguf_config(file: GgufFile) -> DecoderConfig:
    """The architecture from GGUF metadata.

    Raises UnknownModel for a missing or senseless field, UnsupportedModel for an architecture or option not served.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ("llama", "qwen3"):
        raise UnsupportedModel(f"{file.path}: general.architecture={architecture!r}; llama and qwen3 are supported")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModel(
            f"{file.path}: split.count={file.metadata['split.count']}: merge the parts into one file"
        )
    fields = _Fields(file, architecture)
    heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        fields.only(name, head_dim)
    for name in ("expert_count", "attention.sliding_window"):
        fields.only(name, 0)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnknownModel(f"{file.path}: tensor token_embd.weight is missing")
    return DecoderConfig(
        architecture=architecture,
        layers=fields.integer("block_count"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_position=fields.integer("context_length"),
        rms_norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        rope=_read_rope(fields, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
    )


def read_gguf_weights(file: GgufFile, config: DecoderConfig) -> LazyWeights:
    """The tensors as transformers names, orders and shapes them.

    Raises UnknownModel for a missing or misshapen tensor, UnsupportedModel for one that has no place in the model.
    """
    stored = {_hugging_face_name(name): name for name in file.tensors if name != ROPE_FREQUENCIES}
    found: dict[str, Shape] = {name: file.tensors[old].shape for name, old in stored.items()}
    check_shapes(str(file.path), decoder_shapes(config), found)

    def read(name: str) -> NDArray[np.float32]:
        values = file.dequantize(stored[name])
        if config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            return _split_halves(values, config.head_dim)
        return values

    return LazyWeights(found, read)


def _split_halves(values: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Undo the row order of llama GGUFs, whose rotary pairs are (2i, 2i + 1) instead of (i, i + head_dim / 2)."""
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _hugging_face_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    return name


class _Fields:
    """Metadata of one architecture, checked for type and range as it is read."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, name: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def describe(self, name: str) -> str:
        return f"{self.file.path}: {self.architecture}.{name}={self.get(name)!r}"

    def integer(self, name: str, default: int | None = None) -> int:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, int) or value <= 0:
            raise UnknownModel(f"{self.describe(name)}: a positive integer is needed")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise UnknownModel(f"{self.describe(name)}: a positive number is needed")
        # float32 1e-5 reads as 9.99999975e-06; the shortest decimal that rounds to it is what was meant.
        return float(str(np.float32(value)))

    def only(self, name: str, value: int) -> None:
        if self.get(name) not in (None, value):
            raise UnsupportedModel(f"{self.describe(name)}: only {value} is supported")


def _read_rope(fields: _Fields, head_dim: int) -> RopeConfig:
    theta = fields.real("rope.freq_base", 10000.0)
    kind = fields.get("rope.scaling.type")
    if ROPE_FREQUENCIES in fields.file.tensors:
        return _llama3_rope(fields.file, theta, head_dim)
    if kind in (None, "none"):
        return RopeConfig(theta)
    factor = fields.real("rope.scaling.factor")
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind != "yarn":
        raise UnsupportedModel(f"{fields.describe('rope.scaling.type')}: none, linear and yarn are supported")
    if fields.get("rope.scaling.attn_factor") not in (None, 1.0):
        raise UnsupportedModel(f"{fields.describe('rope.scaling.attn_factor')}: only 1.0 is supported")
    original = fields.integer("rope.scaling.original_context_length")
    return RopeConfig(theta, "yarn", factor, original_max_position=original)


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> RopeConfig:
    stored = file.dequantize(ROPE_FREQUENCIES).ravel()
    factor = float(stored.max())
    rope = RopeConfig(theta, "llama3", factor, **LLAMA3_ROPE)  # type: ignore[arg-type]
    if stored.shape != (head_dim // 2,) or not np.allclose(stored, _llama3_factors(rope, head_dim), rtol=1e-3):
        raise UnsupportedModel(f"{file.path}: {ROPE_FREQUENCIES} are not the frequency factors of Llama 3")
    return rope


def _llama3_factors(rope: RopeConfig, head_dim: int) -> NDArray[np.float64]:
    """[head_dim / 2] divisors of the rotary frequencies, as transformers' llama3 scaling implies them."""
    wavelengths = 2 * math.pi * rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope.original_max_position / wavelengths
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return 1 / ((1 - np.clip(smooth, 0, 1)) / rope.factor + np.clip(smooth, 0, 1))
