"""Tiny random Hugging Face decoders, with the config and weights our networks read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dflash_reference import MAX_POSITION, rope_parameters
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dcut_engines.model_config import DecoderConfig, RopeConfig, Weights
from dcut_engines.weights import decoder_shapes

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TinyTarget:
    """A decoder of a few thousand parameters and transformers' model of the same weights."""

    config: DecoderConfig
    weights: Weights
    model: torch.nn.Module

    @torch.no_grad()
    def reference(self, token_ids: list[int]) -> tuple[FloatArray, list[FloatArray]]:
        """Logits [n, V] after every token, and each layer's output [n, hidden], by transformers."""
        after: list[FloatArray] = []
        inner: Any = self.model.model
        hooks = [layer.register_forward_hook(lambda *call: after.append(call[2][0].numpy())) for layer in inner.layers]
        logits = self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].numpy()
        for hook in hooks:
            hook.remove()
        return logits, after

    def features(self, token_ids: list[int], layers: tuple[int, ...]) -> FloatArray:
        """Outputs of the listed layers, concatenated: [n, F]."""
        after = self.reference(token_ids)[1]
        return np.concatenate([after[layer] for layer in layers], axis=1)


def tiny_llama(*, tied: bool = False, attention_bias: bool = False) -> TinyTarget:
    """Llama 3: its rope scaling and grouped queries; scaling acts within the first few positions."""
    rope = RopeConfig(theta=10000.0, kind="llama3", factor=8.0, original_max_position=16)
    config = _config("llama", rope, tied=tied, attention_bias=attention_bias)
    return _build(config, LlamaForCausalLM(LlamaConfig(**_common(config))), seed=1)


def tiny_qwen3() -> TinyTarget:
    """Qwen3: norms of queries and keys, tied head, YaRN."""
    rope = RopeConfig(theta=10000.0, kind="yarn", factor=4.0, original_max_position=MAX_POSITION // 4)
    config = _config("qwen3", rope, tied=True, attention_bias=False)
    return _build(config, Qwen3ForCausalLM(Qwen3Config(**_common(config))), seed=2)


def _config(architecture: Any, rope: RopeConfig, *, tied: bool, attention_bias: bool) -> DecoderConfig:
    return DecoderConfig(
        architecture=architecture,
        layers=3,
        hidden_size=64,
        intermediate_size=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab_size=97,
        max_position=MAX_POSITION,
        rms_norm_eps=1e-5,
        rope=rope,
        tie_word_embeddings=tied,
        attention_bias=attention_bias,
        qk_norm=architecture == "qwen3",
    )


def _common(config: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": rope_parameters(config.rope),
    }


def _build(config: DecoderConfig, model: torch.nn.Module, seed: int) -> TinyTarget:
    """Weights large enough that attention, and not the residual, decides; transformers' own start is near zero."""
    rng = np.random.default_rng(seed)
    weights: dict[str, FloatArray] = {}
    for name, shape in decoder_shapes(config).items():
        norm = "norm" in name
        drawn = rng.uniform(0.5, 1.5, shape) if norm else rng.normal(0.0, 1.2 / math.sqrt(shape[-1]), shape)
        weights[name] = drawn.astype(np.float32)
    loaded = {name: torch.tensor(array) for name, array in weights.items()}
    missing = model.load_state_dict(loaded, strict=False).missing_keys
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    return TinyTarget(config, weights, model.train(mode=False))
