"""What drafting would yield, before anybody drafts: the scores of recent blocks, ranked again for another batch."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcut_trt.types import FloatArray, IntArray

Floats = NDArray[np.float64]

WINDOW = 256  # blocks; their mean yield is known to about 2 %


@dataclass(frozen=True, slots=True)
class Prospect:
    """rate: tokens per millisecond.  size: the K that is best if it is the same in every step."""

    rate: float
    size: int


class _Latest:
    """The scores of the latest blocks of one kind [n, D + 1], oldest first."""

    def __init__(self, draft_length: int, window: int) -> None:
        self._window = window
        self._scores: FloatArray = np.empty((0, draft_length + 1), np.float32)
        self._new: list[FloatArray] = []  # logarithms, not among _scores yet: most steps add, few ask
        self.count = 0

    def add(self, log_scores: FloatArray) -> None:
        if self.count or log_scores.shape[1] == self._scores.shape[1]:
            self._new.append(log_scores)
            self.count = min(self.count + len(log_scores), self._window)

    def all(self) -> FloatArray:
        for length, group in itertools.groupby(self._new, key=lambda scores: scores.shape[1]):
            scores = np.exp(np.concatenate(list(group)))
            missing = self._scores.shape[1] - length
            if missing:
                survival = self._scores.mean(axis=0)
                onward = survival[-missing:] / max(float(survival[-missing - 1]), 1e-6)
                scores = np.concatenate((scores, scores[:, -1:] * onward), axis=1)
            self._scores = np.concatenate((self._scores, scores))[-self._window :]
        self._new.clear()
        return self._scores


class RecentBlocks:
    """The scores of the latest blocks, apart for greedy requests and for sampled ones, of whose drafts fewer are
    accepted: so a batch of either, or of both, is foreseen from blocks like its own."""

    def __init__(self, draft_length: int, window: int = WINDOW) -> None:
        self._greedy, self._sampled = _Latest(draft_length, window), _Latest(draft_length, window)

    def known(self, *, sampled: bool) -> int:
        """Blocks of that kind."""
        return (self._sampled if sampled else self._greedy).count

    def add(self, log_scores: FloatArray, temperatures: FloatArray) -> None:
        """Take in blocks [b, depth + 1]; a short one goes on as blocks on the average did from there, and is left out
        as long as there were none.

        log_scores: of accepting each prefix.  temperatures: [b].
        """
        count = np.count_nonzero(temperatures)
        if count in (0, len(temperatures)):
            (self._sampled if count else self._greedy).add(log_scores)
            return
        self._greedy.add(log_scores[temperatures == 0])
        self._sampled.add(log_scores[temperatures != 0])

    def batches(self, batch: int, sampled: int, latest: int) -> FloatArray:
        """The latest blocks as batches of this size, [n, batch, D + 1], as many as they fill.

        sampled: how many of the batch are.  latest: blocks that count, of both kinds.
        """
        if not (self._greedy.count and self._sampled.count):
            sampled = batch if self._sampled.count else 0  # one kind stands for both
        parts = [
            (kind.all(), size) for kind, size in ((self._greedy, batch - sampled), (self._sampled, sampled)) if size
        ]
        parts = [(scores[-math.ceil(latest * size / batch) :], size) for scores, size in parts]
        count = max(1, min(len(scores) // size for scores, size in parts))
        return np.concatenate(
            [np.resize(scores[-count * size :], (count, size, scores.shape[1])) for scores, size in parts], axis=1
        )


def prospect(batches: FloatArray, depth: int, sizes: IntArray, cost_ms: Floats, switch_ms: float) -> Prospect:
    """What steps would bring if these batches [n, B, D + 1], cut at `depth`, were the drafts.

    sizes: [m] K.  cost_ms: [m] what a step of K rows costs.  switch_ms: and more, if the last step's K was another.
    """
    cut = -batches[:, :, : depth + 1].reshape(len(batches), -1)
    expected = np.cumsum(-np.sort(cut, axis=1), axis=1, dtype=np.float64)[:, sizes - 1]  # [n, m]
    steady = expected.mean(axis=0) / cost_ms
    home = int(np.argmax(steady))
    free_ms = cost_ms + switch_ms
    chosen = np.argmax(expected / free_ms, axis=1)
    free = expected[np.arange(len(expected)), chosen].sum() / free_ms[chosen].sum()
    return Prospect(max(float(free), float(steady[home])), int(sizes[home]))
