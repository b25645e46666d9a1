"""A drafter under training: its parameters, what it borrows from the target, its loss and its drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dcut_engines.checkpoint import TargetCheckpoint
from dcut_engines.model_config import DrafterConfig, Weights
from dcut_engines.networks.dflash import EMBEDDING, HEAD, draft_states
from dcut_engines.train.blocks import BlockBatch, BlockBatchOps
from dcut_engines.train.torch_ops import Parameters, RotaryTables, rotary_tables


@dataclass(frozen=True, slots=True)
class TorchDrafter:
    """trained: DFlash tensors by name, fp32.  borrowed: the target's embedding, and its head's rows of draft_vocab.

    ids: [V'] target token id of each head row.  index: [vocab] head row of each token id, -1 where it has none.
    """

    config: DrafterConfig
    trained: dict[str, Tensor]
    borrowed: Parameters
    ids: Tensor
    index: Tensor
    tables: RotaryTables
    precision: torch.dtype

    def logits(self, batch: BlockBatch, rows: Tensor | None = None) -> Tensor:
        """Of every draft, or of the drafts numbered by `rows`: f32 [R, V']."""
        ops = BlockBatchOps({**self.trained, **self.borrowed}, self.tables, self.precision, self.config, batch)
        drafts = batch.draft_rows
        states = draft_states(
            ops,
            self.config,
            features=batch.features,
            block_ids=batch.block_ids,
            positions=batch.positions,
            block_positions=batch.block_positions,
            draft_rows=drafts if rows is None else drafts[rows],
        )
        return ops.linear(states, HEAD).float()

    def loss(self, batch: BlockBatch, gamma: float) -> Tensor:
        """Mean cross-entropy over the offsets k = 1..D, weighted by exp(-(k - 1) / gamma).

        A label outside the draft vocabulary can never be drafted, and teaches nothing.
        """
        places = self.index[batch.labels.clamp(min=0)].masked_fill(batch.labels < 0, -1).flatten()
        rows = (places >= 0).nonzero().squeeze(1)
        offset = rows % self.config.draft_length
        weight = torch.exp(-offset / gamma)
        entropy = functional.cross_entropy(self.logits(batch, rows), places[rows], reduction="none")
        return (entropy * weight).sum() / weight.sum()

    def draft(self, batch: BlockBatch) -> tuple[Tensor, Tensor]:
        """Drafted token ids and their probabilities, each [S * n, D]."""
        with torch.no_grad():
            probability, choice = self.logits(batch).softmax(dim=-1).max(dim=-1)
        shape = (-1, self.config.draft_length)
        return self.ids[choice].view(shape), probability.view(shape)


def torch_drafter(
    config: DrafterConfig,
    weights: Weights,
    target: TargetCheckpoint,
    draft_vocab: tuple[int, ...] | None,
    *,
    max_len: int,
    precision: torch.dtype,
    device: torch.device,
) -> TorchDrafter:
    """Put a drafter and what it borrows on a device. max_len: the longest sequence that it will see."""
    embedding = target.weights["model.embed_tokens.weight"]
    head = embedding if target.config.tie_word_embeddings else target.weights["lm_head.weight"]
    ids = np.arange(config.vocab_size) if draft_vocab is None else np.array(draft_vocab)
    index = np.full(config.vocab_size, -1, np.int64)
    index[ids] = np.arange(len(ids))
    trained = {name: torch.tensor(weights[name], dtype=torch.float32, device=device) for name in weights}
    for tensor in trained.values():
        tensor.requires_grad_()
    return TorchDrafter(
        config=config,
        trained=trained,
        borrowed={
            f"{EMBEDDING}.weight": torch.tensor(embedding, dtype=torch.float32, device=device),
            f"{HEAD}.weight": torch.tensor(head[ids], dtype=precision, device=device),
        },
        ids=torch.tensor(ids, dtype=torch.int64, device=device),
        index=torch.tensor(index, device=device),
        tables=rotary_tables(config, max_len + config.block_size, device),
        precision=precision,
    )
