"""Choose a token from logits, with randomness keyed by (seed, position)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dcut_trt.errors import StepFailed
from dcut_trt.types import FloatArray, SamplingParams

_SEGMENT = 256  # ids per segment of the two-level inverse CDF
# A temperature outside of float32's range would become 0 or infinite, and the weights NaN.
_COLDEST, _HOTTEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_TARGET_SAMPLE = 0  # purpose word of the counter: the target's own token


def uniform(seed: int, position: int, purpose: int = _TARGET_SAMPLE) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (Philox 4x64).

    So pruning, batch mix and acceptance cannot shift a stream: position p always gets the same draw.
    """
    raw = np.random.Philox(key=seed, counter=[position, purpose, 0, 0]).random_raw()
    return float(raw >> 11) * 2.0**-53


def sample_token(logits: FloatArray, params: SamplingParams, seed: int, position: int) -> int:
    """The target's token at an absolute position.

    logits: [V] after bias, min_tokens mask and penalties (adjusting.LogitAdjuster).  Greedy takes the largest, the
    smaller id of two.  Otherwise temperature first, then min-p, then top-k, then top-p over what those left; ids are
    drawn by inverse CDF.
    Raises StepFailed when the row holds NaN or has no finite maximum.
    """
    peak = float(logits.max())
    if not np.isfinite(peak):
        raise StepFailed(f"the target's logits at position {position} are not finite (maximum {peak})")
    if params.greedy:
        return int(logits.argmax())
    draw = uniform(seed, position)
    if params.top_k == 0 and params.top_p >= 1.0 and params.min_p == 0.0:
        return _inverse_cdf(_weights(logits, peak, params), draw)
    ids, weights = _truncate(logits, peak, params)
    return int(ids[_inverse_cdf(weights, draw)])


def best_ids(values: FloatArray, count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest values, best first, ties by index; of all when there are fewer."""
    candidates = np.arange(len(values))
    if count < len(values):
        if count == 0:
            return candidates[:0]
        # Everything at or above the last value that is in, so that ties at the edge are cut by id and not by chance.
        candidates = np.flatnonzero(values >= np.partition(values, len(values) - count)[len(values) - count])
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]


def _truncate(logits: FloatArray, peak: float, params: SamplingParams) -> tuple[NDArray[np.int64], FloatArray]:
    """Candidate ids, best first (ties by id), and their unnormalised weights after min-p, top-k and top-p."""
    candidates = np.arange(len(logits))
    if params.min_p > 0.0:  # the best weighs 1
        candidates = np.flatnonzero(_weights(logits, peak, params) >= params.min_p)
    ids = candidates[best_ids(logits[candidates], params.top_k or len(candidates))]
    weights = _weights(logits[ids], peak, params)
    if params.top_p < 1.0:
        mass = np.cumsum(weights, dtype=np.float64)
        nucleus = int(np.searchsorted(mass, params.top_p * mass[-1])) + 1
        ids, weights = ids[:nucleus], weights[:nucleus]
    return ids, weights


def _weights(logits: FloatArray, peak: float, params: SamplingParams) -> FloatArray:
    temperature = np.float32(min(max(params.temperature, _COLDEST), _HOTTEST))
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to exp(-inf) = 0, as it should
        weights: FloatArray = np.exp((logits - peak) / temperature)
    return weights


def _inverse_cdf(weights: FloatArray, draw: float) -> int:
    """Index drawn in proportion to weights. Sums segments first, so only one segment is scanned."""
    starts = np.arange(0, len(weights), _SEGMENT)
    segments = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = draw * segments[-1]
    segment = min(int(np.searchsorted(segments, target, side="right")), len(segments) - 1)
    before = segments[segment - 1] if segment else 0.0
    inside = np.cumsum(weights[starts[segment] : starts[segment] + _SEGMENT], dtype=np.float64)
    offset = int(np.searchsorted(inside, target - before, side="right"))
    if offset < len(inside) and weights[starts[segment] + offset] > 0:
        return int(starts[segment]) + offset
    # Rounding put the draw past the last mass of its segment: the last id that has any.
    return int(np.flatnonzero(weights[: int(starts[segment]) + len(inside)])[-1])
