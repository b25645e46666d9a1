"""The torch reference itself: without context it must be a plain Qwen3 over the block."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from dflash_reference import MAX_POSITION, TinyDrafter, draft_block, rope_parameters, tiny_drafter
from transformers import Qwen3Config, Qwen3Model

from dcut_engines.model_config import RopeConfig

ROPES = [
    RopeConfig(theta=10000.0),
    RopeConfig(theta=10000.0, kind="yarn", factor=4.0, original_max_position=128),
]


def qwen3(drafter: TinyDrafter) -> torch.nn.Module:
    config = drafter.config
    hf = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=config.attention_bias,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=rope_parameters(config.rope),
    )
    hf._attn_implementation = "eager"
    model = Qwen3Model(hf)
    own = {name: torch.tensor(array) for name, array in drafter.weights.items()}
    own["embed_tokens.weight"] = torch.tensor(drafter.embedding)
    kept = {name: own[name] for name in model.state_dict()}
    model.load_state_dict(kept)
    return torch.nn.Module.train(model, False)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
def test_reference_without_context_is_a_qwen3(causal: bool, bias: bool, rope: RopeConfig) -> None:
    drafter = tiny_drafter(causal=causal, attention_bias=bias, rope=rope, seed=3)
    config = drafter.config
    own = draft_block(drafter.random_features(0, 0), 7, config, drafter.weights, drafter.embedding, drafter.head)
    ids = torch.tensor([[7] + [config.mask_token_id] * config.draft_length])
    size = config.block_size
    mask = torch.full((size, size), -torch.inf).triu(1) if causal else torch.zeros(size, size)
    with torch.no_grad():
        theirs = qwen3(drafter)(input_ids=ids, attention_mask=mask[None, None]).last_hidden_state[0]
    np.testing.assert_allclose(own.hidden, theirs.numpy(), atol=1e-5)


def test_context_and_direction_matter_and_the_draft_vocabulary_restricts() -> None:
    drafter = tiny_drafter(causal=True, seed=1)
    features = drafter.random_features(9, 2)
    borrowed = (drafter.weights, drafter.embedding, drafter.head)
    draft = draft_block(features, 7, drafter.config, *borrowed)
    both_ways = draft_block(features, 7, dataclasses.replace(drafter.config, causal=False), *borrowed)
    shifted = draft_block(features[:-1], 7, drafter.config, *borrowed)
    vocab = np.array([3, 10, 11, 40])
    restricted = draft_block(features, 7, drafter.config, *borrowed, vocab)
    assert not np.allclose(draft.logits, both_ways.logits, atol=1e-2)
    assert not np.allclose(draft.logits, shifted.logits, atol=1e-2)
    assert set(restricted.tokens.tolist()) <= set(vocab.tolist())
    np.testing.assert_allclose(restricted.logits, draft.logits[:, vocab], atol=1e-6)
