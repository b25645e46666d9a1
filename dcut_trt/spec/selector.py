"""Rank all drafts of the batch by the probability that their whole prefix is accepted; keep the best K."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcut_trt.spec.packing import budget
from dcut_trt.types import FloatArray, IntArray


def prefix_log_scores(confidence: FloatArray) -> FloatArray:
    """log s[i, k] = sum of log c[i, t] for t <= k, with the anchor's log s[i, 0] = 0 (paper, Eq. 3).

    confidence: [B, D] in [0, 1]; NaN counts as 0, so that a poisoned row is pruned and not spread.
    Returns [B, D + 1], non-increasing along each row; log space keeps products below the smallest float apart.
    """
    batch, length = confidence.shape
    scores = np.zeros((batch, length + 1), np.float32)
    with np.errstate(divide="ignore"):
        logs = np.log(np.fmin(np.fmax(confidence, 0.0), 1.0))  # fmax(NaN, 0) is 0
    np.cumsum(logs, axis=1, out=scores[:, 1:])
    return scores


def rank(log_scores: FloatArray) -> IntArray:
    """Indices of all B * (D + 1) positions, best first; index = depth * B + row.

    Ties go to the smaller depth, then the smaller row, so that every leading part is a prefix of each request.
    """
    by_depth = -log_scores.T.ravel()  # [(D + 1) * B], depth-major: a stable sort then breaks ties by (depth, row)
    return np.argsort(by_depth, kind="stable").astype(np.int32, copy=False)


def keep_depths(ranked: IntArray, size: int, batch: int) -> IntArray:
    """Drafts kept per request [B] when the best `size` >= B positions are kept."""
    return (np.bincount(ranked[:size] % batch, minlength=batch) - 1).astype(np.int32)


def choose_ratio(
    log_scores: FloatArray, ranked: IntArray, ratios: Sequence[float], cost_ms: NDArray[np.floating[Any]]
) -> int:
    """Index of the ratio with the highest expected tokens per millisecond (paper, Eq. 5).

    log_scores: [B, D + 1].  ranked: from rank().  ratios: [R].  cost_ms: [R], finite and positive.
    """
    batch, block = log_scores.shape
    expected = np.cumsum(np.exp(log_scores.T.ravel()[ranked]), dtype=np.float64)  # [B * (D + 1)]
    return int(np.argmax(expected[_last_kept(tuple(ratios), batch, block)] / cost_ms))


@functools.lru_cache(maxsize=1024)
def _last_kept(ratios: tuple[float, ...], batch: int, block: int) -> IntArray:
    """Place in the ranking of the last position that each ratio's budget keeps: [R]."""
    return np.array([budget(ratio, batch, block) - 1 for ratio in ratios], np.int32)
