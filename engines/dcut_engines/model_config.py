"""Architecture of a target and of its drafter, as read from a checkpoint and as the networks need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# Checkpoint tensors by their Hugging Face / DFlash names, as float32; linear weights are [out, in].
Weights = Mapping[str, NDArray[np.float32]]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. Fields past theta are read only by the kind that names them.

    llama3: factor, low_freq_factor, high_freq_factor, original_max_position.
    yarn: factor, original_max_position, beta_fast, beta_slow, attention_factor (None: 0.1 ln(factor) + 1).
    linear: factor.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A dense decoder: Llama (qk_norm False) or Qwen3 (qk_norm True)."""

    architecture: Literal["llama", "qwen3"]
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """A DFlash drafter: Qwen3-style layers over a block of block_size = D + 1 positions.

    target_layer_ids: 0-based target layers whose outputs, concatenated, are the context features.
    causal: the block attends causally inside itself; otherwise bidirectionally.
    """

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    causal: bool

    @property
    def draft_length(self) -> int:
        """D, the drafts per block; position 0 of the block is the anchor."""
        return self.block_size - 1
