"""How far a drafter's confidence, and what a policy makes of it, can be believed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcut_server.bench.watcher import Watched
from dcut_server.simulate.quality import CALIBRATION_BINS, auroc, expected_calibration_error

Scores = Callable[[Watched], NDArray[np.float64] | None]
"""The probability [b, depth] that the drafts up to a depth are all accepted; None where nothing was scored."""


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predicted against observed probability that all drafts up to a position are accepted, in equal bins of [0, 1].

    predicted, accepted: the mean prediction and the accepted share of each bin, None where it is empty.
    count: positions in each.  ece: expected calibration error over these bins.
    auroc: the chance that an accepted position was scored above a rejected one; None unless there are both.
    """

    predicted: tuple[float | None, ...]
    accepted: tuple[float | None, ...]
    count: tuple[int, ...]
    ece: float
    auroc: float | None


@dataclass(frozen=True, slots=True)
class Confidence:
    """What became of the drafts, by depth 1..D, and how well that was foreseen.

    drafted, kept, accepted: drafts.  prefix_product: of the drafter's own probabilities.  score: what the policy ranked
    by.  Both are of kept positions whose outcome is known; None where the host saw no scores.
    """

    drafted: tuple[int, ...]
    kept: tuple[int, ...]
    accepted: tuple[int, ...]
    prefix_product: Reliability | None
    score: Reliability | None


def confidence_of(watched: Sequence[Watched]) -> Confidence | None:
    """None when nothing was drafted."""
    if not watched:
        return None
    counts = np.zeros((3, max(blocks.depth for blocks in watched)), np.int64)
    for blocks in watched:
        depths = np.arange(blocks.depth)
        counts[0, : blocks.depth] += len(blocks.keep)
        counts[1, : blocks.depth] += (depths < blocks.keep[:, None]).sum(axis=0)
        counts[2, : blocks.depth] += (depths < blocks.accepted[:, None]).sum(axis=0)
    drafted, kept, accepted = (tuple(row) for row in counts.tolist())
    return Confidence(drafted, kept, accepted, _reliability_of(watched, _prefix), _reliability_of(watched, _score))


def reliability(predicted: NDArray[np.float64], accepted: NDArray[np.bool_]) -> Reliability:
    """predicted: [n] in [0, 1].  accepted: [n].  n >= 1."""
    places = np.minimum((predicted * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    count = np.bincount(places, minlength=CALIBRATION_BINS)
    said = np.bincount(places, predicted, CALIBRATION_BINS).astype(np.float64)
    happened = np.bincount(places, accepted, CALIBRATION_BINS).astype(np.float64)
    area = auroc(predicted, accepted)
    return Reliability(
        predicted=_means(said, count),
        accepted=_means(happened, count),
        count=tuple(count.tolist()),
        ece=expected_calibration_error(predicted, accepted),
        auroc=None if math.isnan(area) else area,
    )


def _reliability_of(watched: Sequence[Watched], scores: Scores) -> Reliability | None:
    pairs = [_settled(blocks, scored) for blocks in watched if (scored := scores(blocks)) is not None]
    predicted, accepted = (np.concatenate([pair[part] for pair in pairs]) if pairs else np.empty(0) for part in (0, 1))
    return reliability(predicted, accepted.astype(bool)) if len(predicted) else None


def _settled(blocks: Watched, scored: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores and outcomes of the kept positions of blocks that were judged to their end.

    A rejection settles every position after it as well: to leave those out would count successes only.
    """
    ended = (blocks.judged > blocks.accepted) | (blocks.judged == blocks.keep)
    depths = np.arange(blocks.depth)
    known = depths < np.where(ended, blocks.keep, 0)[:, None]
    return scored[known], (depths < blocks.accepted[:, None])[known]


def _prefix(blocks: Watched) -> NDArray[np.float64] | None:
    if blocks.confidence is None:
        return None
    # A softmax in single precision may exceed 1 by its rounding.
    return np.cumprod(np.minimum(blocks.confidence, 1.0), axis=1, dtype=np.float64)


def _score(blocks: Watched) -> NDArray[np.float64] | None:
    if blocks.log_scores is None:
        return None
    # Some rules rank by more than a probability: what lies above 1 is as sure as can be.
    scored: NDArray[np.float64] = np.exp(np.minimum(blocks.log_scores[:, 1:], 0.0), dtype=np.float64)
    return scored


def _means(sums: NDArray[np.float64], count: NDArray[np.signedinteger[Any]]) -> tuple[float | None, ...]:
    """None of empty bins. Rounding must not lift a share above 1."""
    pairs = zip(sums.tolist(), count.tolist(), strict=True)
    return tuple(min(total / size, 1.0) if size else None for total, size in pairs)
