"""The drafter: DFlash, a few Qwen3-style layers that fill a whole block of masks in one pass (z-lab)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from dcut_engines.model_config import DrafterConfig
from dcut_engines.networks.decoder import add_mlp
from dcut_engines.networks.ops import BlockOps, T
from dcut_engines.networks.select import draft_choice

EMBEDDING = "embed_tokens"  # the target's, handed to the emitter under these names
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class DrafterOutputs(Generic[T]):
    """tokens i32 [R]; confidence f32 [R]; margin f32 [R], None where the emitter leaves it out."""

    tokens: T
    confidence: T
    margin: T | None


def drafter(
    ops: BlockOps[T],
    config: DrafterConfig,
    *,
    features: T,
    block_ids: T,
    positions: T,
    block_positions: T,
    draft_rows: T,
    draft_vocab: T | None,
) -> DrafterOutputs[T]:
    """New context features [C, F] and blocks of ids [N] -> a draft for each of `draft_rows` [R], indices into N.

    positions: [M] of the merged rows, in the emitter's order; block_positions: [N] of the block rows.
    """
    states = draft_states(
        ops,
        config,
        features=features,
        block_ids=block_ids,
        positions=positions,
        block_positions=block_positions,
        draft_rows=draft_rows,
    )
    return DrafterOutputs(*draft_choice(ops, ops.linear(states, HEAD), draft_vocab))


def draft_states(
    ops: BlockOps[T],
    config: DrafterConfig,
    *,
    features: T,
    block_ids: T,
    positions: T,
    block_positions: T,
    draft_rows: T,
) -> T:
    """What the head reads for each of `draft_rows`: [R, hidden]. Arguments as drafter's."""
    eps = config.rms_norm_eps
    context = ops.rms_norm(ops.linear(features, "fc"), "hidden_norm", eps)  # [C, hidden], the same for every layer
    block = ops.embed(block_ids, EMBEDDING)  # [N, hidden]
    for layer in range(config.layers):
        attended = attend_layer(ops, config, layer, context, block, positions, block_positions)
        if layer == config.layers - 1:  # nobody reads the other rows after this
            attended, block = ops.gather(attended, draft_rows), ops.gather(block, draft_rows)
        block = ops.add(block, ops.linear(attended, f"layers.{layer}.self_attn.o_proj"))
        block = add_mlp(ops, f"layers.{layer}", block, eps)
    return ops.rms_norm(block, "norm", eps)


def attend_layer(
    ops: BlockOps[T], config: DrafterConfig, layer: int, context: T, block: T, positions: T, block_positions: T
) -> T:
    """The layer's attention before o_proj, for the block rows: [N, heads * head_dim].

    Only the block is normed: the context, projected once, feeds every layer as it is.
    """
    name, eps = f"layers.{layer}", config.rms_norm_eps
    attention = f"{name}.self_attn"
    normed = ops.rms_norm(block, f"{name}.input_layernorm", eps)
    merged = ops.merge(context, normed)  # [M, hidden]

    query = ops.rms_norm(ops.linear(normed, f"{attention}.q_proj"), f"{attention}.q_norm", eps, config.heads)
    key, value = ops.linears(merged, [f"{attention}.k_proj", f"{attention}.v_proj"])
    key = ops.rms_norm(key, f"{attention}.k_norm", eps, config.kv_heads)
    query = ops.rope(query, block_positions, config.heads)
    key = ops.rope(key, positions, config.kv_heads)
    return ops.attend_block(query, key, value, layer, causal=config.causal)
