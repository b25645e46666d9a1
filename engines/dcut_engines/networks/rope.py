"""Rotary angles, computed once at build time so that no runtime's precision touches them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dcut_engines.model_config import RopeConfig

Float64 = NDArray[np.float64]


def rope_tables(config: RopeConfig, head_dim: int, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine for every position, each [positions, head_dim / 2] and scaled by the attention factor.

    The second half of a head turns by the same angles as the first.
    """
    # float32 angles, as transformers computes them: trained weights have seen exactly that rounding
    frequencies = inverse_frequencies(config, head_dim).astype(np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies  # [positions, head_dim / 2]
    scale = np.float32(attention_factor(config))
    return np.cos(angles) * scale, np.sin(angles) * scale


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Float64:
    """Radians per position of each rotated pair, [head_dim / 2]."""
    base = config.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    match config.kind:
        case "default":
            return base
        case "linear":
            return base / config.factor
        case "llama3":
            return _llama3(config, base)
        case "yarn":
            return _yarn(config, base, head_dim)


def attention_factor(config: RopeConfig) -> float:
    """Factor on cosine and sine; only YaRN has one (arXiv 2309.00071, Section 3.4)."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    return 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0


def _llama3(config: RopeConfig, base: Float64) -> Float64:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = config.original_max_position * base / (2 * math.pi)  # full turns within the original context
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    return _blend(base / config.factor, base, np.clip(kept, 0.0, 1.0))


def _yarn(config: RopeConfig, base: Float64, head_dim: int) -> Float64:
    """YaRN: pairs that turn often are kept, slow ones interpolated, with a ramp over the pair index between."""

    def pair_turning(rotations: float) -> float:
        return (
            head_dim * math.log(config.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))
        )

    low = max(math.floor(pair_turning(config.beta_fast)), 0)
    high = min(math.ceil(pair_turning(config.beta_slow)), head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001)
    return _blend(base / config.factor, base, 1.0 - np.clip(ramp, 0.0, 1.0))


def _blend(interpolated: Float64, kept: Float64, weight: Float64) -> Float64:
    return interpolated * (1.0 - weight) + kept * weight
