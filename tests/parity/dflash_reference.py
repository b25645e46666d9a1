"""A dense DFlash drafter in torch: no cache, no packing, one request; and tiny random drafters to compare on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dcut_engines.model_config import DrafterConfig, RopeConfig, Weights

FloatArray = NDArray[np.float32]
MAX_POSITION = 512


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafted block.

    tokens [D] target ids, confidence [D], logits [D, draft vocab], hidden [D + 1, hidden] after the last norm.
    """

    tokens: NDArray[np.int64]
    confidence: FloatArray
    logits: FloatArray
    hidden: FloatArray


@torch.no_grad()
def draft_block(
    features: FloatArray,
    anchor: int,
    config: DrafterConfig,
    weights: Weights,
    embedding: FloatArray,
    head: FloatArray,
    draft_vocab: NDArray[np.integer[Any]] | None = None,
) -> Draft:
    """Draft D tokens after `anchor`, which sits at position P, from the features [P, F] of positions 0..P-1.

    embedding [V, hidden] and head [V, hidden] are the target's; draft_vocab [v] are the head rows drafts come from.
    """
    w = {name: torch.tensor(array, dtype=torch.float32) for name, array in weights.items()}
    rows = head if draft_vocab is None else head[draft_vocab]
    block = [anchor] + [config.mask_token_id] * config.draft_length
    context = torch.tensor(features) @ w["fc.weight"].T  # [P, hidden]
    context = _rms_norm(context, w["hidden_norm.weight"], config.rms_norm_eps)
    x = torch.tensor(embedding[block])  # [D + 1, hidden]
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        weight = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
        normed = _rms_norm(x, weight["input_layernorm.weight"], config.rms_norm_eps)
        x = x + _attend(normed, context, config, weight)
        normed = _rms_norm(x, weight["post_attention_layernorm.weight"], config.rms_norm_eps)
        gated = torch.nn.functional.silu(normed @ weight["mlp.gate_proj.weight"].T)
        x = x + (gated * (normed @ weight["mlp.up_proj.weight"].T)) @ weight["mlp.down_proj.weight"].T
    hidden = _rms_norm(x, w["norm.weight"], config.rms_norm_eps)
    logits = hidden[1:] @ torch.tensor(rows).T  # row k predicts position P + k; row 0 is unused
    confidence, best = logits.softmax(-1).max(-1)
    tokens = best.numpy() if draft_vocab is None else np.asarray(draft_vocab)[best.numpy()]
    return Draft(tokens.astype(np.int64), confidence.numpy(), logits.numpy(), hidden.numpy())


def _attend(noise: Tensor, context: Tensor, config: DrafterConfig, weight: dict[str, Tensor]) -> Tensor:
    """Queries from the block [D + 1, hidden], keys and values from context [P, hidden] and block."""
    past, size, group = len(context), len(noise), config.heads // config.kv_heads
    both = torch.cat([context, noise])
    q = _heads(noise, "q_proj", config.heads, weight)  # [heads, D + 1, head_dim]
    k = _heads(both, "k_proj", config.kv_heads, weight)
    v = _heads(both, "v_proj", config.kv_heads, weight)
    q = _rms_norm(q, weight["self_attn.q_norm.weight"], config.rms_norm_eps)
    k = _rms_norm(k, weight["self_attn.k_norm.weight"], config.rms_norm_eps)
    positions = torch.arange(past + size)
    q, k = _rotate(q, positions[past:], config), _rotate(k, positions, config)
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) / math.sqrt(config.head_dim)
    if config.causal:
        scores = scores.masked_fill(positions[None, :] > positions[past:, None], -math.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(group, 0)  # [heads, D + 1, head_dim]
    return _linear(out.transpose(0, 1).reshape(size, -1), "o_proj", weight)


def _heads(x: Tensor, name: str, heads: int, weight: dict[str, Tensor]) -> Tensor:
    return _linear(x, name, weight).view(len(x), heads, -1).transpose(0, 1)


def _linear(x: Tensor, name: str, weight: dict[str, Tensor]) -> Tensor:
    return x @ weight[f"self_attn.{name}.weight"].T + weight.get(f"self_attn.{name}.bias", torch.zeros(()))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, positions: Tensor, config: DrafterConfig) -> Tensor:
    """Rotate [heads, rows, head_dim] by halves; the angles, rope scaling included, are transformers' own."""
    hf = Qwen3Config(head_dim=config.head_dim, max_position_embeddings=MAX_POSITION)
    hf.rope_parameters = rope_parameters(config.rope)
    cos, sin = Qwen3RotaryEmbedding(hf)(x, positions[None])
    first, second = x.chunk(2, dim=-1)
    rotated: Tensor = x * cos + torch.cat([-second, first], dim=-1) * sin
    return rotated


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """The `rope_parameters` entry of a Hugging Face config for this embedding."""
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        parameters["attention_factor"] = rope.attention_factor
    return parameters


@dataclass(frozen=True, slots=True)
class TinyDrafter:
    """A random drafter with the target tensors it borrows: embedding and head [V, hidden]."""

    config: DrafterConfig
    weights: Weights
    embedding: FloatArray
    head: FloatArray

    def random_features(self, rows: int, seed: int) -> FloatArray:
        """Context features [rows, F]."""
        width = len(self.config.target_layer_ids) * self.config.hidden_size
        return np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32)


def tiny_drafter(
    *,
    causal: bool,
    block_size: int = 4,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    attention_bias: bool = False,
    rope: RopeConfig | None = None,
    seed: int = 0,
) -> TinyDrafter:
    """A drafter of a few thousand parameters whose attention and norms all matter to the result."""
    config = DrafterConfig(
        layers=layers,
        hidden_size=32,
        intermediate_size=48,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=16,
        vocab_size=61,
        rms_norm_eps=1e-5,
        rope=rope or RopeConfig(theta=10000.0),
        attention_bias=attention_bias,
        block_size=block_size,
        mask_token_id=5,
        target_layer_ids=(0, 2, 3),
        num_target_layers=4,
        causal=causal,
    )
    rng = np.random.default_rng(seed)
    weights = {name: _random(name, shape, rng) for name, shape in _shapes(config).items()}
    embedding, head = rng.standard_normal((2, config.vocab_size, config.hidden_size), dtype=np.float32)
    # small, or every mask row would repeat its own residual, and every confidence be near one
    return TinyDrafter(config, weights, np.float32(0.1) * embedding, np.float32(0.4) * head)


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
    if "norm" in name:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return rng.normal(0.0, 1.5 / math.sqrt(shape[-1]), shape).astype(np.float32)


def _shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a DFlash checkpoint, linear weights [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    projections = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    for prefix in (f"layers.{layer}." for layer in range(config.layers)):
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": shape for name, shape in projections.items()}
        if config.attention_bias:
            shapes |= {f"{prefix}self_attn.{name}_proj.bias": shape[:1] for name, shape in projections.items()}
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    return shapes
