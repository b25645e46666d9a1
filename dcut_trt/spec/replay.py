"""What drafting would yield, before anybody drafts: the scores of recent blocks, ranked again for another batch."""

from __future__ import annotations

import itertools
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


class RecentBlocks:
    """The scores of the latest blocks [n, D + 1], oldest first."""

    def __init__(self, draft_length: int, window: int = WINDOW) -> None:
        self._window = window
        self._scores: FloatArray = np.empty((0, draft_length + 1), np.float32)
        self._new: list[FloatArray] = []  # not among _scores yet: most steps add, few ask
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, scores: FloatArray) -> None:
        """Take in blocks [b, depth + 1]; a short one goes on as blocks on the average did from there, and is left out
        as long as there were none."""
        if self._count or scores.shape[1] == self._scores.shape[1]:
            self._new.append(scores)
            self._count = min(self._count + len(scores), self._window)

    def _all(self) -> FloatArray:
        for length, group in itertools.groupby(self._new, key=lambda scores: scores.shape[1]):
            scores = np.concatenate(list(group))
            missing = self._scores.shape[1] - length
            if missing:
                survival = self._scores.mean(axis=0)
                onward = survival[-missing:] / max(float(survival[-missing - 1]), 1e-6)
                scores = np.concatenate((scores, scores[:, -1:] * onward), axis=1)
            self._scores = np.concatenate((self._scores, scores))[-self._window :]
        self._new.clear()
        return self._scores

    def prospect(
        self, batch: int, depth: int, sizes: IntArray, cost_ms: Floats, switch_ms: float, latest: int
    ) -> Prospect:
        """What steps would bring if the latest blocks, cut at `depth`, were the drafts of as many batches as they fill.

        sizes: [n] K.  cost_ms: [n] what a step of K rows costs.  switch_ms: and more, if the last step's K was another.
        """
        blocks = self._all()[-latest:, : depth + 1]
        batches = max(1, len(blocks) // batch)
        pooled = np.resize(blocks[-batches * batch :], (batches, batch * (depth + 1)))
        expected = np.cumsum(-np.sort(-pooled, axis=1), axis=1, dtype=np.float64)[:, sizes - 1]  # [batches, n]
        steady = expected.mean(axis=0) / cost_ms
        home = int(np.argmax(steady))
        free_ms = cost_ms + switch_ms
        chosen = np.argmax(expected / free_ms, axis=1)
        free = expected[np.arange(batches), chosen].sum() / free_ms[chosen].sum()
        return Prospect(max(float(free), float(steady[home])), int(sizes[home]))
