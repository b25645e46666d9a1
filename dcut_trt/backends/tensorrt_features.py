"""Target features that stay on the device: handles on rows of them, and their way into the drafter's input."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence

import numpy as np

from dcut_trt.backends.tensorrt_device import Block, Buffer, Device, Transfers
from dcut_trt.stage_types import FeatureRows
from dcut_trt.types import IntArray


class ResidentRows:
    """Rows of a device buffer, in any order; FeatureRows of this backend. They are in the target's output at first."""

    def __init__(self, store: FeatureStore, source: Buffer, rows: IntArray) -> None:
        self.source = source
        self.rows = rows
        self._store = store

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice, /) -> ResidentRows:
        return ResidentRows(self._store, self.source, self.rows[rows])

    def copy(self) -> ResidentRows:
        """The same rows, to be kept past the target's next call. They are copied only if that call is to come."""
        kept = ResidentRows(self._store, self.source, self.rows)
        self._store.keep(kept)
        return kept


class FeatureStore:
    """The target's feature output, and what became of rows that outlived it."""

    def __init__(self, transfers: Transfers, output: Buffer, width: int) -> None:
        """width: bytes of a feature row."""
        self.output = output
        self.width = width
        self.capacity = output.nbytes // width  # rows
        self._device: Device = transfers.device
        # Only rows that are copied out for keeping need it; those of a step go through the drafter's own block.
        self._indices = Block(transfers, {"rows": (np.int32, self.capacity)})
        self._kept: weakref.WeakSet[ResidentRows] = weakref.WeakSet()

    def rows(self, rows: IntArray) -> ResidentRows:
        """Rows of the output."""
        return ResidentRows(self, self.output, rows)

    def keep(self, rows: ResidentRows) -> None:
        if rows.source is self.output:
            self._kept.add(rows)

    def make_way(self) -> None:
        """Copy what is still wanted of the output to memory of its own; the target is about to overwrite it.

        When every step drafts there is nothing to copy: the drafter has read the features by then.
        """
        kept = list(self._kept)
        self._kept.clear()
        count = sum(map(len, kept))
        if count == 0:
            return
        self._indices.upload({"rows": np.concatenate([handle.rows for handle in kept])})
        copied = self._device.allocate(count * self.width)
        self._device.gather(copied, self.output, self._indices.parts["rows"].part(0, 4 * count), self.width)
        first = 0
        for handle in kept:
            handle.source = copied
            handle.rows = np.arange(first, first + len(handle), dtype=np.int32)
            first += len(handle)

    def gather(self, to: Buffer, pieces: Sequence[ResidentRows], indices: Buffer) -> None:
        """Write the pieces, one after the other, into the rows of `to`. indices: their rows, uploaded already."""
        first = 0
        for source, run in itertools.groupby(pieces, key=lambda piece: piece.source):
            count = sum(map(len, run))
            if count:
                part = to.part(first * self.width, count * self.width)
                self._device.gather(part, source, indices.part(4 * first, 4 * count), self.width)
            first += count


def resident(pieces: Iterable[FeatureRows]) -> list[ResidentRows]:
    """The pieces as what they are here: this target made them."""
    handles = []
    for piece in pieces:
        assert isinstance(piece, ResidentRows), "features of another target"
        handles.append(piece)
    return handles


def split(pieces: Sequence[ResidentRows], count: int) -> tuple[list[ResidentRows], list[ResidentRows]]:
    """The first `count` rows, and the rest."""
    head: list[ResidentRows] = []
    rest: list[ResidentRows] = []
    for piece in pieces:
        taken = min(count, len(piece))
        count -= taken
        head += [piece[:taken]] if taken else []
        rest += [piece[taken:]] if taken < len(piece) else []
    return head, rest


def row_indices(pieces: Iterable[ResidentRows]) -> IntArray:
    """Where each row stands in its source."""
    rows = [piece.rows for piece in pieces]
    return np.concatenate(rows) if rows else np.empty(0, np.int32)
