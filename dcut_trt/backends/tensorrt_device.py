"""Device memory and the one stream, behind a protocol: CUDA through torch, or a test's host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

Bytes = NDArray[np.uint8]

ALIGNMENT = 256  # bytes; of every address that TensorRT is given
STAGING_BYTES = 1 << 20


class Buffer(Protocol):
    """A range of device memory."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def part(self, start: int, nbytes: int) -> Buffer:
        """The bytes start .. start + nbytes - 1 of it."""


class Graph(Protocol):
    """Captured work, to be enqueued in one call."""

    def replay(self) -> None: ...


class Device(Protocol):
    """Everything but synchronize, allocate and pinned only enqueues, in stream order.

    name, compute_capability: such as "NVIDIA L4" and "8.9".  stream: its handle.
    """

    name: str
    compute_capability: str
    stream: int

    def free_bytes(self) -> int: ...

    def allocate(self, nbytes: int) -> Buffer:
        """Zeroed memory, aligned to ALIGNMENT; it is freed with the last reference to it."""

    def pinned(self, nbytes: int) -> Bytes:
        """Host memory that the device copies from and to while the host goes on."""

    def upload(self, to: Buffer, source: Bytes) -> None:
        """source: pinned, and unchanged until the next synchronize."""

    def download(self, to: Bytes, source: Buffer) -> None:
        """to: pinned; it holds the bytes after the next synchronize."""

    def clear(self, buffer: Buffer) -> None:
        """Fill with zeros."""

    def move_columns(self, buffer: Buffer, pitch: int, source: int, to: int, nbytes: int) -> None:
        """In every row of `pitch` bytes, copy the bytes from `source` on over those from `to` on."""

    def gather(self, to: Buffer, source: Buffer, rows: Buffer, width: int) -> None:
        """Row i of `to` becomes row rows[i] of `source`; rows of `width` bytes, indices i32."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """What `work` would enqueue; it is not run."""

    def synchronize(self) -> None:
        """Wait until all that was enqueued is done."""


class Meter:
    """Milliseconds that one network has kept the host: enqueueing it and waiting for it."""

    def __init__(self) -> None:
        self.network_ms = 0.0

    def time(self, work: Callable[[], None]) -> None:
        begun = time.perf_counter()
        work()
        self.network_ms += (time.perf_counter() - begun) * 1e3


class Download:
    """An array on its way to the host."""

    def __init__(self, transfers: Transfers, staged: Bytes, kind: DTypeLike, shape: tuple[int, ...]) -> None:
        self._transfers = transfers
        self._staged = staged
        self._kind = kind
        self._shape = shape
        self._value: NDArray[Any] | None = None

    def arrive(self) -> None:
        """Keep the bytes, which stand in memory that is about to be used again."""
        self._value = self._staged.view(self._kind).reshape(self._shape).copy()

    def read(self, meter: Meter) -> NDArray[Any]:
        """The array; waits for the stream unless it is here already."""
        if self._value is None:
            meter.time(self._transfers.synchronize)
        assert self._value is not None
        return self._value


class Transfers:
    """Small arrays to and from the device, through pinned memory that is used anew after every synchronize."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._memory = device.pinned(STAGING_BYTES)
        self._used = 0
        self._pending: list[Download] = []

    def stage(self, nbytes: int) -> Bytes:
        """Pinned memory, zeroed, valid until the next synchronize."""
        aligned = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._used + aligned > len(self._memory):
            self.synchronize()
            if aligned > len(self._memory):
                self._memory = self.device.pinned(2 * aligned)
        taken = self._memory[self._used : self._used + nbytes]
        self._used += aligned
        taken[:] = 0
        return taken

    def download(self, source: Buffer, kind: DTypeLike, shape: tuple[int, ...]) -> Download:
        """Enqueue the copy of an array that starts where `source` does."""
        nbytes = int(np.dtype(kind).itemsize * np.prod(shape, dtype=np.int64))
        staged = self.stage(nbytes)
        if nbytes:
            self.device.download(staged, source.part(0, nbytes))
        download = Download(self, staged, kind, shape)
        self._pending.append(download)
        return download

    def synchronize(self) -> None:
        self.device.synchronize()
        for download in self._pending:
            download.arrive()
        self._pending.clear()
        self._used = 0


class Block:
    """Named arrays side by side in device memory, so that one copy uploads all of them."""

    def __init__(self, transfers: Transfers, arrays: Mapping[str, tuple[DTypeLike, int]]) -> None:
        """arrays: element type and greatest length by name."""
        self._transfers = transfers
        self._starts: dict[str, int] = {}
        sizes = {name: int(np.dtype(kind).itemsize) * length for name, (kind, length) in arrays.items()}
        end = 0
        for name, size in sizes.items():
            self._starts[name] = end
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self._kinds = {name: np.dtype(kind) for name, (kind, _) in arrays.items()}
        self.buffer = transfers.device.allocate(end)
        self.parts = {name: self.buffer.part(self._starts[name], size) for name, size in sizes.items()}

    @property
    def addresses(self) -> dict[str, int]:
        return {name: part.address for name, part in self.parts.items()}

    def upload(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Set these arrays, and zeros after them and in all others."""
        staged = self._transfers.stage(self.buffer.nbytes)
        for name, values in arrays.items():
            start, kind = self._starts[name], self._kinds[name]
            size = len(values) * kind.itemsize
            assert size <= self.parts[name].nbytes, f"{name} is longer than the memory for it"
            staged[start : start + size].view(kind)[:] = values
        self._transfers.device.upload(self.buffer, staged)
