"""Speculative sampling with sampled drafts, by exact enumeration: every draw is followed with its probability.

One request of two (the neighbour only competes for the budget) drafts D tokens from q and verifies the prefix that the
selection keeps. Rejection sampling accepts draft z with min(1, p / q) and draws from the residual otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from dcut_trt.spec.packing import budget
from dcut_trt.spec.selector import choose_ratio, keep_depths, prefix_log_scores, rank

Probs = NDArray[np.float64]
Model = Callable[[tuple[int, ...]], Probs]
"""Prefix of output tokens -> [V] probabilities of the next."""

Keep = Callable[[Probs, tuple[int, ...]], int]
"""(q [D, V], drawn tokens) -> drafts that are verified."""

RATIOS = (1 / 3, 2 / 3, 1.0)
NEIGHBOUR = (0.55, 0.4)  # confidences of the other request's drafts


def tables(vocab: int, seed: int) -> Model:
    """A target whose distribution depends on the whole prefix."""
    generator = np.random.default_rng(seed)
    cells: dict[tuple[int, ...], Probs] = {
        prefix: generator.dirichlet(np.full(vocab, 0.6))
        for length in range(6)
        for prefix in itertools.product(range(vocab), repeat=length)
    }
    return cells.__getitem__


def step(target: Model, q: Probs, keep: Keep, prefix: tuple[int, ...]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """(probability, emitted tokens) of every way that one step can go. q: [D, V], one row per depth."""
    for drafts in itertools.product(range(q.shape[1]), repeat=len(q)):
        drawn = float(np.prod([q[depth, token] for depth, token in enumerate(drafts)]))
        if drawn > 0:
            kept = drafts[: keep(q, drafts)]
            for probability, emitted in _verify(target, q, kept, prefix):
                yield drawn * probability, emitted


def _verify(
    target: Model, q: Probs, drafts: tuple[int, ...], prefix: tuple[int, ...]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    so_far, emitted = 1.0, ()
    for depth, token in enumerate(drafts):
        p = target(prefix + emitted)
        accepted = min(1.0, float(p[token] / q[depth, token]))
        residual = np.maximum(p - q[depth], 0.0)
        if accepted < 1.0:
            residual /= residual.sum()
            for other in np.flatnonzero(residual):
                yield so_far * (1 - accepted) * float(residual[other]), (*emitted, int(other))
        so_far, emitted = so_far * accepted, (*emitted, token)
    for other, probability in enumerate(target(prefix + emitted)):
        yield so_far * float(probability), (*emitted, other)


def distribution(target: Model, q: Probs, keep: Keep, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every text of this length when steps repeat until it is full."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    while any(len(text) < length for text in texts):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in texts.items():
            ways = [(1.0, ())] if len(text) == length else step(target, q, keep, text)
            for chance, emitted in ways:
                grown = (text + tuple(emitted))[:length]
                longer[grown] = longer.get(grown, 0.0) + probability * chance
        texts = longer
    return texts


def total_variation(found: dict[tuple[int, ...], float], target: Model, length: int, vocab: int) -> float:
    """Half the sum of all differences from the target's own distribution over texts."""
    distance = 0.0
    for text in itertools.product(range(vocab), repeat=length):
        own = float(np.prod([target(text[:place])[token] for place, token in enumerate(text)]))
        distance += abs(found.get(text, 0.0) - own)
    return distance / 2


def _confidence(row: list[float]) -> NDArray[np.float32]:
    return np.array([row, NEIGHBOUR[: len(row)]], np.float32)


def keep_by_budget(row: list[float], ratio: float) -> int:
    """The first request's keep depth at a budget that was fixed before anything was drawn."""
    scores = prefix_log_scores(_confidence(row))
    return int(keep_depths(rank(scores), budget(ratio, 2, len(row) + 1), 2)[0])


def keep_by_argmax(row: list[float], cost_ms: tuple[float, ...]) -> int:
    """The same at the ratio that this step's own scores choose."""
    scores = prefix_log_scores(_confidence(row))
    ranked = rank(scores)
    ratio = RATIOS[choose_ratio(scores, ranked, RATIOS, np.array(cost_ms))]
    return int(keep_depths(ranked, budget(ratio, 2, len(row) + 1), 2)[0])


def drawn(q: Probs, drafts: tuple[int, ...]) -> list[float]:
    """Confidence of the drawn tokens: the score that depends on the draw."""
    return [float(q[depth, token]) for depth, token in enumerate(drafts)]


def shifted(q: Probs, drafts: tuple[int, ...]) -> list[float]:
    """Depth k is scored by the tokens drawn before it."""
    return [1.0, *drawn(q, drafts)[:-1]]


def largest(q: Probs, _: tuple[int, ...]) -> list[float]:
    """Depth k is scored by the drafter's largest probability there, whatever was drawn."""
    return [float(row.max()) for row in q]
