"""Rotary tables against transformers' own initialisation of each kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dflash_reference import rope_parameters
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dcut_engines.model_config import RopeConfig
from dcut_engines.networks.rope import rope_tables

POSITIONS = 4096
ROPES = {
    "default": RopeConfig(theta=10000.0),
    "linear": RopeConfig(theta=10000.0, kind="linear", factor=4.0),
    "llama3": RopeConfig(theta=500000.0, kind="llama3", factor=8.0, original_max_position=1024),
    "llama3_other_bands": RopeConfig(
        500000.0, "llama3", factor=32.0, original_max_position=512, low_freq_factor=2.0, high_freq_factor=8.0
    ),
    "yarn": RopeConfig(theta=1000000.0, kind="yarn", factor=4.0, original_max_position=1024),
    "yarn_own_factor": RopeConfig(1000000.0, "yarn", factor=8.0, original_max_position=512, attention_factor=0.9),
    "yarn_other_betas": RopeConfig(10000.0, "yarn", factor=2.0, original_max_position=256, beta_fast=8, beta_slow=2),
}


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_tables_equal_transformers(rope: RopeConfig, head_dim: int) -> None:
    hf = LlamaConfig(head_dim=head_dim, max_position_embeddings=POSITIONS, rope_parameters=rope_parameters(rope))
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.arange(POSITIONS)[None])
    ours = rope_tables(rope, head_dim, POSITIONS)
    for table, theirs in zip(ours, (cos, sin), strict=True):
        assert table.shape == (POSITIONS, head_dim // 2)
        assert table.dtype == np.float32
        # one rounding of a frequency, times the position, is the angle's error in both
        np.testing.assert_allclose(table, theirs[0, :, : head_dim // 2], atol=POSITIONS * 2**-23)
