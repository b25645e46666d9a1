"""The networks' vocabulary in torch, differentiable: what is trained is the definition that every runtime serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dcut_engines.model_config import DecoderConfig, DrafterConfig
from dcut_engines.networks.rope import rope_tables

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """cos, sin: [positions, 1, head_dim], both halves of a head turning by the same angles."""

    cos: Tensor
    sin: Tensor


def rotary_tables(config: DecoderConfig | DrafterConfig, positions: int, device: torch.device) -> RotaryTables:
    cos, sin = rope_tables(config.rope, config.head_dim, positions)
    cos, sin = (np.concatenate([half, half], axis=1)[:, None] for half in (cos, sin))
    return RotaryTables(torch.tensor(cos, device=device), torch.tensor(sin, device=device))


class TorchOps:
    """The verbs that need no cache. Parameters keep their own type; products are made in `precision`."""

    def __init__(self, parameters: Parameters, tables: RotaryTables, precision: torch.dtype) -> None:
        self.parameters = parameters
        self.tables = tables
        self.precision = precision

    def embed(self, ids: Tensor, name: str) -> Tensor:
        return functional.embedding(ids, self.parameters[f"{name}.weight"]).float()

    def linear(self, rows: Tensor, name: str) -> Tensor:
        bias = self.parameters.get(f"{name}.bias")
        weight = self.parameters[f"{name}.weight"].to(self.precision)
        return functional.linear(rows.to(self.precision), weight, None if bias is None else bias.to(self.precision))

    def linears(self, rows: Tensor, names: Sequence[str]) -> list[Tensor]:
        return [self.linear(rows, name) for name in names]

    def rms_norm(self, rows: Tensor, name: str, eps: float, heads: int = 1) -> Tensor:
        weight = self.parameters[f"{name}.weight"]
        split = rows.float().unflatten(-1, (heads, -1))
        normed = split * torch.rsqrt(split.pow(2).mean(-1, keepdim=True) + eps) * weight
        return normed.flatten(-2)

    def rope(self, rows: Tensor, positions: Tensor, heads: int) -> Tensor:
        split = rows.float().unflatten(-1, (heads, -1))  # [rows, heads, head_dim]
        first, second = split.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (split * self.tables.cos[positions] + turned * self.tables.sin[positions]).flatten(-2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        raise NotImplementedError("rows attend to each other where something says which belong together")

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=-1)

    def gather(self, rows: Tensor, indices: Tensor) -> Tensor:
        return rows[indices]

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        peak, choice = logits.float().max(dim=-1)
        return choice, peak

    def peak_probability(self, logits: Tensor, peak: Tensor) -> Tensor:
        return torch.exp(logits.float() - peak[:, None]).sum(dim=-1).reciprocal()

    def margin(self, logits: Tensor, peak: Tensor, probability: Tensor) -> None:
        return None


class SequenceOps(TorchOps):
    """A target over whole sequences, packed one after the other; each attends causally to itself."""

    def __init__(
        self,
        parameters: Parameters,
        tables: RotaryTables,
        precision: torch.dtype,
        config: DecoderConfig,
        lengths: Sequence[int],
    ) -> None:
        super().__init__(parameters, tables, precision)
        self.config = config
        self.lengths = list(lengths)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        split = (
            part.to(self.precision).unflatten(-1, (count, -1)).transpose(0, 1).split(self.lengths, dim=1)
            for part, count in ((query, heads), (key, kv_heads), (value, kv_heads))
        )
        attended = [
            functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
            for q, k, v in zip(*split, strict=True)
        ]
        return torch.cat(attended, dim=1).transpose(0, 1).flatten(-2)
