"""The target's hidden states under a corpus: computed once, kept on disk, read back sequence by sequence."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dcut_engines.build_options import InvalidOption
from dcut_engines.checkpoint import TargetCheckpoint
from dcut_engines.model_config import DecoderConfig
from dcut_engines.networks.decoder import decoder_layer
from dcut_engines.train.corpus import Corpus
from dcut_engines.train.torch_ops import Parameters, RotaryTables, SequenceOps, rotary_tables

FORWARD_ROWS = 1024  # packed rows of one target call; more fall out of the processor's caches
SCHEME = 1  # goes into the cache key: a change of what is stored must not find old files

Progress = Callable[[int], None]
"""Takes how many tokens of the text are done."""


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """The part of a target below its last listed layer, ready to compute features."""

    config: DecoderConfig
    layer_ids: tuple[int, ...]
    parameters: Parameters
    tables: RotaryTables
    precision: torch.dtype

    def rows(self, tokens: NDArray[np.integer], lengths: list[int]) -> Tensor:
        """Packed sequences, tokens [K] -> the residual stream after every listed layer, bf16 [K, F]."""
        device = self.tables.cos.device
        ops = SequenceOps(self.parameters, self.tables, self.precision, self.config, lengths)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        after: dict[int, Tensor] = {}
        with torch.no_grad():
            hidden = ops.embed(torch.tensor(tokens.astype(np.int64), device=device), "model.embed_tokens")
            for layer in range(max(self.layer_ids) + 1):
                hidden = decoder_layer(ops, self.config, layer, hidden, positions)
                if layer in self.layer_ids:
                    after[layer] = hidden.to(torch.bfloat16)
            return torch.cat([after[layer] for layer in self.layer_ids], dim=-1)


def load_features(
    target: TargetCheckpoint,
    layer_ids: tuple[int, ...],
    *,
    max_len: int,
    precision: torch.dtype,
    device: torch.device,
) -> TargetFeatures:
    """Read the layers that features need, each in `precision`, norms in fp32."""
    wanted = ("model.embed_tokens.", *(f"model.layers.{layer}." for layer in range(max(layer_ids) + 1)))
    parameters = {
        name: torch.tensor(target.weights[name], dtype=torch.float32 if "norm" in name else precision, device=device)
        for name in target.weights
        if name.startswith(wanted)
    }
    return TargetFeatures(
        target.config, layer_ids, parameters, rotary_tables(target.config, max_len, device), precision
    )


@dataclass(frozen=True, slots=True)
class FeatureCache:
    """values: bf16 bits of all tokens of a corpus, uint16 [tokens, F], mapped from disk."""

    values: NDArray[np.uint16]

    def sequence(self, start: int, length: int) -> Tensor:
        """Features of `length` tokens from `start`: bf16 [length, F]."""
        rows = np.array(self.values[start : start + length]).view(np.int16)
        return torch.from_numpy(rows).view(torch.bfloat16)


def cached_features(
    folder: Path,
    target_sha256: str,
    corpus: Corpus,
    features: Callable[[], TargetFeatures],
    layer_ids: tuple[int, ...],
    width: int,
    progress: Progress = lambda done: None,
) -> FeatureCache:
    """The features of a corpus from `folder`, computed first where they are not there.

    `features` loads the target, and is called only when something is to be computed.
    """
    about = json.dumps([SCHEME, target_sha256, layer_ids, corpus.sha256])
    path = folder / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.bf16"
    shape = (len(corpus.tokens), width)
    if not (path.is_file() and path.stat().st_size == 2 * shape[0] * shape[1]):
        folder.mkdir(parents=True, exist_ok=True)
        needed, free = 2 * shape[0] * shape[1], shutil.disk_usage(folder).free
        if needed > free:
            raise InvalidOption("--out", folder, f"features take {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free")
        partial = path.with_suffix(".partial")
        _compute(np.memmap(partial, np.uint16, "w+", shape=shape), corpus, features(), progress)
        partial.replace(path)
    return FeatureCache(np.memmap(path, np.uint16, "r", shape=shape))


def _compute(out: NDArray[np.uint16], corpus: Corpus, features: TargetFeatures, progress: Progress) -> None:
    first = 0
    while first < len(corpus):
        last, rows = first, 0
        while last < len(corpus) and (last == first or rows + corpus.lengths[last] <= FORWARD_ROWS):
            rows += int(corpus.lengths[last])
            last += 1
        start = int(corpus.starts[first])
        values = features.rows(corpus.tokens[start : start + rows], corpus.lengths[first:last].tolist())
        out[start : start + rows] = values.cpu().view(torch.int16).numpy().view(np.uint16)
        progress(start + rows)
        first = last
