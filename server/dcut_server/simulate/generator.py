"""Traces drawn from a plain model of acceptance, for drafters of which only a few statistics are known."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from dcut_server.simulate.traces import Trace


@dataclass(frozen=True, slots=True)
class Shape:
    """Log odds that draft k of a block is right, given that all before it are:

        level - decay * (k - 1) + request + block + draft

    the last three from normal distributions of mean 0, once per request, per block and per draft. The drafter's
    confidence is the same probability with its log odds disturbed by `noise`, also normal.
    """

    level: float
    decay: float
    request_spread: float
    block_spread: float
    draft_spread: float
    noise: float


def generate(
    shape: Shape,
    *,
    draft_length: int,
    requests: int,
    positions: int,
    seed: int,
    name: str = "generated",
    prompt_len: int = 128,
) -> Trace:
    """So many texts of so many positions each, without margins."""
    generator = np.random.default_rng(seed)
    normal = generator.standard_normal
    blocks = requests * positions
    odds = shape.level - shape.decay * np.arange(draft_length, dtype=np.float32)
    # Evenly spread over the distribution and not drawn from it: the mean should not hang on a few hundred draws.
    shares = (generator.permutation(requests) + 0.5) / requests
    offsets = np.array([NormalDist().inv_cdf(share) for share in shares.tolist()], np.float32)
    odds = odds + shape.request_spread * np.repeat(offsets, positions)[:, None]
    odds = odds + shape.block_spread * normal((blocks, 1), np.float32)
    odds = odds + shape.draft_spread * normal((blocks, draft_length), np.float32)  # [N, D]
    right = generator.random(odds.shape, np.float32) * (1 + np.exp(-odds)) < 1
    confidence = 1 / (1 + np.exp(-odds - shape.noise * normal(odds.shape, np.float32)))
    left = np.tile(np.arange(positions, 0, -1), requests)  # tokens that follow, to the end of the text
    known = np.minimum(left, draft_length)
    accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), known)
    return Trace(
        name=name,
        source=f"generated: {shape}, seed {seed}",
        starts=np.arange(requests + 1, dtype=np.int64) * positions,
        prompt_lens=np.full(requests, prompt_len, np.int32),
        temperatures=np.zeros(requests, np.float32),
        confidence=confidence.astype(np.float32),
        accepted=accepted.astype(np.int32),
        judged=np.where(accepted < known, accepted + 1, accepted).astype(np.int32),
    )
