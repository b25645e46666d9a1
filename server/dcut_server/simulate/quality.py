"""How well scores tell accepted drafts from rejected ones, and how well they say how often."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcut_trt.spec.selector import keep_depths, rank
from dcut_trt.types import FloatArray, IntArray

Values = NDArray[np.floating[Any]]
Labels = NDArray[np.bool_]

CALIBRATION_BINS = 15


def mid_ranks(values: Values) -> NDArray[np.float64]:
    """Rank of each value from 1, equal values sharing the mean of their ranks: [n]."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def auroc(scores: Values, accepted: Labels) -> float:
    """Probability that an accepted draft scores above a rejected one, ties counting half; NaN without both kinds.

    scores, accepted: [n].  -inf is the lowest score.
    """
    positive = int(accepted.sum())
    negative = len(accepted) - positive
    if not positive or not negative:
        return float("nan")
    above = mid_ranks(scores)[accepted].sum() - positive * (positive + 1) / 2
    return float(above / (positive * negative))


def spearman(first: Values, second: Values) -> float:
    """Spearman's rank correlation of two [n], by mid ranks; NaN when one of them is constant."""
    ranks = np.stack([mid_ranks(first), mid_ranks(second)])
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    spread = float(np.sqrt((centred**2).sum(axis=1).prod()))
    return float(centred[0] @ centred[1]) / spread if spread else float("nan")


def expected_calibration_error(probability: Values, accepted: Labels, bins: int = CALIBRATION_BINS) -> float:
    """Mean gap between what was said and what happened, over equally wide bins (Guo et al. 2017, Eq. 3).

    probability: [n] in [0, 1].  accepted: [n], at least one.
    """
    place = np.minimum((probability * bins).astype(int), bins - 1)
    said = np.bincount(place, probability, bins)
    happened = np.bincount(place, accepted, bins)
    return float(np.abs(said - happened).sum() / len(probability))


def tokens_verified(log_scores: FloatArray, accepted: IntArray, size: int) -> int:
    """Tokens that a step emits when the best `size` positions of its batch are verified; divide by size for the yield.

    log_scores: [B, D + 1], non-increasing, column 0 the anchor's.  accepted: [B] drafts that the target accepts when
    all are verified.  size: K, B <= K <= B * (D + 1).
    """
    keep = keep_depths(rank(log_scores), size, len(log_scores))
    return len(log_scores) + int(np.minimum(keep, accepted).sum())
