"""The target: a dense decoder of the Llama and Qwen3 families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from dcut_engines.model_config import DecoderConfig
from dcut_engines.networks.ops import Ops, T
from dcut_engines.networks.select import greedy_choice


@dataclass(frozen=True, slots=True)
class DecoderOutputs(Generic[T]):
    """argmax i32 [H]; features f32 [K, F], None when no layer is listed; logits f32 [S, V]."""

    argmax: T
    features: T | None
    logits: T


def decoder(
    ops: Ops[T],
    config: DecoderConfig,
    feature_layers: tuple[int, ...],
    *,
    token_ids: T,
    positions: T,
    head_rows: T,
    logit_rows: T,
) -> DecoderOutputs[T]:
    """Packed rows [K] through all layers; only `head_rows` [H] of them meet the vocabulary.

    Features are the residual stream after each of `feature_layers` (0-based), in that order.
    """
    hidden = ops.embed(token_ids, "model.embed_tokens")
    after: list[T] = []
    for layer in range(config.layers):
        hidden = decoder_layer(ops, config, layer, hidden, positions)
        after.append(hidden)

    wanted = ops.rms_norm(ops.gather(hidden, head_rows), "model.norm", config.rms_norm_eps)
    logits = ops.linear(wanted, "model.embed_tokens" if config.tie_word_embeddings else "lm_head")  # [H, V]
    return DecoderOutputs(
        argmax=greedy_choice(ops, logits),
        features=ops.concat([after[layer] for layer in feature_layers]) if feature_layers else None,
        logits=ops.gather(logits, logit_rows),
    )


def decoder_layer(ops: Ops[T], config: DecoderConfig, layer: int, hidden: T, positions: T) -> T:
    """One pre-norm layer: [K, hidden] -> [K, hidden]."""
    name = f"model.layers.{layer}"
    attention = f"{name}.self_attn"
    normed = ops.rms_norm(hidden, f"{name}.input_layernorm", config.rms_norm_eps)
    query, key, value = ops.linears(normed, [f"{attention}.{part}_proj" for part in "qkv"])
    if config.qk_norm:
        query = ops.rms_norm(query, f"{attention}.q_norm", config.rms_norm_eps, config.heads)
        key = ops.rms_norm(key, f"{attention}.k_norm", config.rms_norm_eps, config.kv_heads)
    query = ops.rope(query, positions, config.heads)
    key = ops.rope(key, positions, config.kv_heads)
    attended = ops.attend(query, key, value, layer)
    hidden = ops.add(hidden, ops.linear(attended, f"{attention}.o_proj"))
    return add_mlp(ops, name, hidden, config.rms_norm_eps)


def add_mlp(ops: Ops[T], name: str, hidden: T, eps: float) -> T:
    """hidden + the layer's gated MLP of its norm: [rows, hidden] -> [rows, hidden]."""
    normed = ops.rms_norm(hidden, f"{name}.post_attention_layernorm", eps)
    gate, up = (ops.linear(normed, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
    return ops.add(hidden, ops.linear(ops.swiglu(gate, up), f"{name}.mlp.down_proj"))
