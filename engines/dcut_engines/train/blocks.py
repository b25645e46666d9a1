"""Blocks to fill: anchors in responses, the context that each may see, and the tokens that it should draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dcut_engines.model_config import DrafterConfig
from dcut_engines.train.torch_ops import Parameters, RotaryTables, TorchOps

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence: tokens [L], the features of its first tokens, and where blocks begin: anchors [n], 1 to L - 2."""

    tokens: IntArray
    features: Tensor
    anchors: IntArray


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """S sequences with n blocks each, contexts padded to C rows, blocks of W = D + 1 rows.

    #  context rows:  sequence 0: 0 .. C-1 | sequence 1: 0 .. C-1 | ...      positions 0 .. C-1 each
    #  block rows:    sequence 0: block 0: P .. P+D | block 1: ... | ...      P is the anchor's position

    features: [S * C, F].  block_ids, block_positions: [S * n * W].  positions: context rows, then block rows.
    bias: [S, n, W, C + W], 0 where a block row sees a context row or a row of its block, else -inf.
    labels: [S * n, D] token ids, -1 behind the end of the sequence.
    """

    sequences: int
    features: Tensor
    block_ids: Tensor
    positions: Tensor
    block_positions: Tensor
    bias: Tensor
    labels: Tensor

    @property
    def draft_rows(self) -> Tensor:
        """Block rows other than the anchors': [S * n * D]."""
        width = self.bias.shape[2]
        rows = torch.arange(len(self.block_ids), device=self.block_ids.device)
        return rows[rows % width != 0]


def block_bias(anchors: Tensor, context: int, width: int, *, causal: bool) -> Tensor:
    """Which of `context` rows and of the block itself each block row sees: anchors [S, n] -> [S, n, W, C + W].

    Context is seen strictly before the anchor: the anchor's own features do not exist when it is drafted from.
    """
    device = anchors.device
    before = torch.arange(context, device=device) < anchors[..., None, None]  # [S, n, 1, C]
    inside = torch.ones(width, width, dtype=torch.bool, device=device)
    if causal:
        inside = inside.tril()
    seen = torch.cat(
        [before.expand(*anchors.shape, width, context), inside.expand(*anchors.shape, width, width)], dim=-1
    )
    return torch.zeros(seen.shape, device=device).masked_fill(~seen, -torch.inf)


def make_batch(examples: Sequence[Example], config: DrafterConfig, device: torch.device) -> BlockBatch:
    """All examples have the same number of anchors."""
    width, count = config.block_size, len(examples)
    context = max(int(example.anchors.max()) for example in examples)
    features = torch.zeros(count, context, examples[0].features.shape[1], dtype=torch.bfloat16)
    anchors = np.stack([example.anchors for example in examples])  # [S, n]
    block_ids = np.full((*anchors.shape, width), config.mask_token_id, np.int64)
    labels = np.full((*anchors.shape, width - 1), -1, np.int64)
    for row, example in enumerate(examples):
        rows = min(context, len(example.features))
        features[row, :rows] = example.features[:rows]
        padded = np.concatenate([example.tokens, np.full(width, -1, np.int64)])
        block_ids[row, :, 0] = padded[example.anchors]
        labels[row] = padded[example.anchors[:, None] + np.arange(1, width)]
    block_positions = (anchors[..., None] + np.arange(width)).ravel()
    positions = np.concatenate([np.tile(np.arange(context), count), block_positions])
    return BlockBatch(
        sequences=count,
        features=features.flatten(0, 1).to(device),
        block_ids=torch.from_numpy(block_ids.ravel()).to(device),
        positions=torch.from_numpy(positions).to(device),
        block_positions=torch.from_numpy(block_positions).to(device),
        bias=block_bias(torch.from_numpy(anchors).to(device), context, width, causal=config.causal),
        labels=torch.from_numpy(labels.reshape(-1, width - 1)).to(device),
    )


class BlockBatchOps(TorchOps):
    """A drafter over the rows of one BlockBatch, which already says who sees whom."""

    def __init__(
        self,
        parameters: Parameters,
        tables: RotaryTables,
        precision: torch.dtype,
        config: DrafterConfig,
        batch: BlockBatch,
    ) -> None:
        super().__init__(parameters, tables, precision)
        self.config = config
        self.batch = batch

    def merge(self, context: Tensor, block: Tensor) -> Tensor:
        return torch.cat([context, block])

    def attend_block(self, query: Tensor, key: Tensor, value: Tensor, layer: int, *, causal: bool) -> Tensor:
        """The heads of a key-value head share its scores' rows: [S, kv_heads, n, group * W, C + W]."""
        config, bias = self.config, self.batch.bias
        sequences, blocks, width, seen = bias.shape
        context, kv_heads, group = seen - width, config.kv_heads, config.heads // config.kv_heads

        query = query.to(self.precision).view(sequences, blocks, width, kv_heads, group, config.head_dim)
        query = query.permute(0, 3, 1, 4, 2, 5).flatten(3, 4)  # [S, kv_heads, n, group * W, head_dim]
        parts = []
        for rows in (key.to(self.precision), value.to(self.precision)):
            before, inside = rows.split([sequences * context, sequences * blocks * width])
            parts.append(before.view(sequences, context, kv_heads, -1).transpose(1, 2))
            parts.append(inside.view(sequences, blocks, width, kv_heads, -1).permute(0, 3, 1, 2, 4))
        key_before, key_inside, value_before, value_inside = parts

        packed = query.flatten(2, 3)  # all blocks of a sequence read one context
        before = (packed @ key_before.transpose(-1, -2)).unflatten(2, (blocks, -1))
        scores = torch.cat([before, query @ key_inside.transpose(-1, -2)], dim=-1).float()
        spread = bias.repeat(1, 1, group, 1)[:, None]  # [S, 1, n, group * W, C + W]
        weights = (scores * config.head_dim**-0.5 + spread).softmax(dim=-1).to(self.precision)
        from_context = (weights[..., :context].flatten(2, 3) @ value_before).unflatten(2, (blocks, -1))
        attended = from_context + weights[..., context:] @ value_inside  # [S, kv_heads, n, group * W, head_dim]
        attended = attended.unflatten(3, (group, width)).permute(0, 2, 4, 1, 3, 5)
        return attended.reshape(sequences * blocks * width, -1)
