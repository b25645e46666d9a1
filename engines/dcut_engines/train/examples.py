"""Which sequences and anchors each step trains on: a function of seed and step, so that a resume needs no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcut_engines.train.blocks import Example, IntArray
from dcut_engines.train.corpus import Corpus
from dcut_engines.train.features import FeatureCache

LENGTH_WINDOW = 16  # steps whose sequences are sorted by length together, so that few context rows are padding


@dataclass(frozen=True, slots=True)
class Pool:
    """Sequences out of several corpora with their features. members: (corpus, sequence in it)."""

    corpora: tuple[Corpus, ...]
    caches: tuple[FeatureCache, ...]
    members: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def response_tokens(self) -> int:
        return sum(len(self.anchors(index)) + 1 for index in range(len(self)))

    def length(self, index: int) -> int:
        corpus, sequence = self.members[index]
        return int(self.corpora[corpus].lengths[sequence])

    def anchors(self, index: int) -> IntArray:
        """Response positions that have a token behind them."""
        corpus, sequence = self.members[index]
        return np.arange(self.corpora[corpus].response_start[sequence], self.length(index) - 1, dtype=np.int64)

    def example(self, index: int, anchors: IntArray) -> Example:
        corpus, sequence = self.members[index]
        tokens = self.corpora[corpus].sequence(sequence).astype(np.int64)
        start = int(self.corpora[corpus].starts[sequence])
        return Example(tokens, self.caches[corpus].sequence(start, int(anchors.max())), anchors)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Batches of `sequences` examples with `anchors` anchors each, epoch after epoch."""

    pool: Pool
    sequences: int
    anchors: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self.pool) // self.sequences)

    def examples(self, step: int) -> list[Example]:
        """What step 0, 1, ... trains on."""
        epoch, place = divmod(step, self.steps_per_epoch)
        rng = np.random.default_rng([self.seed, 1, step])
        return [self._draw(index, rng) for index in self._epoch(epoch)[place]]

    def _draw(self, index: int, rng: np.random.Generator) -> Example:
        places = self.pool.anchors(index)
        # a short response repeats anchors rather than that its batch becomes ragged
        drawn = rng.choice(places, self.anchors, replace=len(places) < self.anchors)
        return self.pool.example(index, np.sort(drawn))

    def _epoch(self, epoch: int) -> list[Sequence[int]]:
        """The sequences of every step of an epoch, similar lengths together, in random order."""
        rng = np.random.default_rng([self.seed, 0, epoch])
        order = np.resize(rng.permutation(len(self.pool)), self.steps_per_epoch * self.sequences)
        window = LENGTH_WINDOW * self.sequences
        batches: list[Sequence[int]] = []
        for first in range(0, len(order), window):
            group = sorted(order[first : first + window].tolist(), key=self.pool.length)
            batches += [group[start : start + self.sequences] for start in range(0, len(group), self.sequences)]
        return [batches[place] for place in rng.permutation(len(batches))]
