"""What the drafter's pack node decided, as the engine's Plan: on the device until somebody asks.

The engine counts requests in its own order, the device in the order of cache rows:

  engine's packed row:   0    1    2    3        requests a, b; keep = [1, 1]
                        a0   a1   b0   b1
  device's packed row:  b0   b1   a0   a1        row_of = [1, 0]; packed_of = [2, 3, 0, 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from dcut_trt.backends.tensorrt_device import Download, Meter
from dcut_trt.backends.tensorrt_memory import Memory
from dcut_trt.stage_types import Offer, Rows
from dcut_trt.types import IntArray

_NONE: IntArray = np.empty(0, np.int32)


class ResidentPlan:
    """One step's plan. `size` waits for one int, the bucket; the rest is read back with the target's answer.

    budgets: [R] rows of each offered ratio.  row_of: [B] cache row of each request.  kv_lens: [B] where its anchor
    stands; they are in the target's write_indices, in the order of cache rows.  width: D + 1.
    """

    def __init__(
        self,
        memory: Memory,
        meter: Meter,
        offer: Offer,
        budgets: Sequence[int],
        row_of: IntArray,
        kv_lens: IntArray,
        width: int,
    ) -> None:
        self.row_of = row_of
        self.kv_lens = kv_lens
        self.possible = len(row_of) * width
        self._memory = memory
        self._meter = meter
        self._offer = offer
        self._budgets = budgets
        self._bucket = memory.transfers.download(memory.drafter_io["bucket"], np.int32, (1,))
        self._downloads: tuple[Download, Download] | None = None

    @cached_property
    def bucket(self) -> int:
        """Index of the chosen ratio."""
        return int(self._bucket.read(self._meter)[0])

    @property
    def ratio(self) -> float:
        return self._offer.ratios[self.bucket]

    @property
    def size(self) -> int:
        return self._budgets[self.bucket]

    def request(self) -> None:
        """Enqueue what will be asked for, so that one wait brings it along with the target's answer."""
        if self._downloads is None:
            transfers, parts = self._memory.transfers, self._memory.packed.parts
            keep = transfers.download(self._memory.drafter_io["keep"], np.int32, (len(self.row_of),))
            self._downloads = keep, transfers.download(parts["token_ids"], np.int32, (self.possible,))

    @cached_property
    def _read(self) -> tuple[IntArray, IntArray]:
        """keep [B] and packed token ids, both in the device's order."""
        self.request()
        assert self._downloads is not None
        keep, token_ids = (download.read(self._meter) for download in self._downloads)
        return keep, token_ids

    @cached_property
    def keep(self) -> IntArray:
        kept: IntArray = self._read[0][self.row_of]
        return kept

    @cached_property
    def cu_lens(self) -> IntArray:
        return begins(self.keep + 1)

    @cached_property
    def request_rows(self) -> IntArray:
        return np.repeat(np.arange(len(self.row_of), dtype=np.int32), self.keep + 1)

    @cached_property
    def packed_of(self) -> IntArray:
        """The device's packed row of each of the engine's [K]."""
        return packed_rows(self.row_of, self.keep + 1)

    def drafts_of(self, row: int) -> list[int]:
        first, last = int(self.cu_lens[row]) + 1, int(self.cu_lens[row + 1])
        drafts: list[int] = self._read[1][self.packed_of[first:last]].tolist()
        return drafts

    def rows(self, past_lens: IntArray, block_tables: tuple[IntArray, ...]) -> Rows:
        return Rows(_NONE, _NONE, past_lens, _NONE, block_tables, resident=self)


def begins(lengths: IntArray) -> IntArray:
    """Where each request's rows begin, and how many there are in all: [B + 1]."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def packed_rows(row_of: IntArray, lengths: IntArray) -> IntArray:
    """The device's packed row of each of the engine's, for requests of these lengths [B]."""
    by_row = np.empty_like(lengths)
    by_row[row_of] = lengths
    first = begins(by_row)[row_of]  # [B]
    within = np.arange(lengths.sum(), dtype=np.int32) - np.repeat(begins(lengths)[:-1], lengths)
    packed: IntArray = np.repeat(first, lengths) + within
    return packed.astype(np.int32, copy=False)
