"""Host memory as a device: a stream that runs only when it is waited for, memory with bounds, CUDA graphs as lists."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from dcut_trt.backends.tensorrt_device import ALIGNMENT, Bytes

Work = Callable[[], None]


class Call(Protocol):
    """An enqueued network. check_replay: raises when what it was captured with does not hold any more."""

    def __call__(self) -> None: ...

    def check_replay(self) -> None: ...


_HANDLES = itertools.count(0x57EA0001)
STREAMS: weakref.WeakValueDictionary[int, HostDevice] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class HostBuffer:
    bytes: Bytes

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    @property
    def nbytes(self) -> int:
        return len(self.bytes)

    def part(self, start: int, nbytes: int) -> HostBuffer:
        assert 0 <= start <= start + nbytes <= self.nbytes, "outside of the buffer"
        return HostBuffer(self.bytes[start : start + nbytes])


@dataclass(slots=True)
class HostGraph:
    device: HostDevice
    work: list[Call]
    replays: int = 0

    def replay(self) -> None:
        assert self.device.capturing is None
        for work in self.work:
            work.check_replay()
        self.device.queue.extend(self.work)
        self.replays += 1


@dataclass(slots=True, weakref_slot=True)
class HostDevice:
    """free: bytes there are in all.  syncs: how often the stream was waited for, and the bytes that this brought."""

    free: int = 1 << 33
    name: str = "host"
    compute_capability: str = "8.9"
    stream: int = 0
    queue: list[Work] = field(default_factory=list)
    capturing: list[Call] | None = None
    graphs: list[HostGraph] = field(default_factory=list)
    syncs: list[int] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)
    gathered: int = 0
    _incoming: int = 0
    _memory: dict[int, tuple[Any, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stream = next(_HANDLES)
        STREAMS[self.stream] = self

    def free_bytes(self) -> int:
        return self.free - sum(nbytes for owner, nbytes in self._memory.values() if owner() is not None)

    def allocate(self, nbytes: int) -> HostBuffer:
        assert nbytes <= self.free_bytes(), "out of device memory"
        owner = np.zeros(nbytes + ALIGNMENT, np.uint8)
        start = -owner.ctypes.data % ALIGNMENT
        memory = owner[start : start + nbytes]
        self._memory[memory.ctypes.data] = weakref.ref(owner), nbytes
        return HostBuffer(memory)

    def view(self, address: int, nbytes: int) -> Bytes:
        """The bytes at an address; AssertionError outside of what was allocated."""
        for base, (owner, size) in self._memory.items():
            memory = owner()
            if memory is not None and base <= address and address + nbytes <= base + size:
                start = address - memory.ctypes.data
                return memory[start : start + nbytes]
        raise AssertionError(f"{nbytes} bytes at {address:#x} are not all device memory")

    def pinned(self, nbytes: int) -> Bytes:
        return np.zeros(nbytes, np.uint8)

    def enqueue(self, work: Call) -> None:
        """Into the graph while one is captured."""
        (self.queue if self.capturing is None else self.capturing).append(work)

    def _enqueue_copy(self, work: Work) -> None:
        assert self.capturing is None, "only the network belongs into a graph"
        self.queue.append(work)

    def upload(self, to: HostBuffer, source: Bytes) -> None:
        assert to.nbytes == len(source)
        self._enqueue_copy(lambda: _assign(to.bytes, source))

    def download(self, to: Bytes, source: HostBuffer) -> None:
        assert source.nbytes == len(to)
        self._incoming += len(to)
        self._enqueue_copy(lambda: _assign(to, source.bytes))

    def clear(self, buffer: HostBuffer) -> None:
        self._enqueue_copy(lambda: _assign(buffer.bytes, np.uint8(0)))

    def move_columns(self, buffer: HostBuffer, pitch: int, source: int, to: int, nbytes: int) -> None:
        table = buffer.bytes.reshape(-1, pitch)
        self.moved.append((source // nbytes, to // nbytes))
        self._enqueue_copy(lambda: _assign(table[:, to : to + nbytes], table[:, source : source + nbytes]))

    def gather(self, to: HostBuffer, source: HostBuffer, rows: HostBuffer, width: int) -> None:
        assert to.nbytes // width == rows.nbytes // 4
        whole = source.bytes[: source.nbytes // width * width].reshape(-1, width)
        indices = rows.bytes.view(np.int32)
        self.gathered += 1
        self._enqueue_copy(lambda: _assign(to.bytes.reshape(-1, width), whole[indices]))

    def capture(self, work: Work) -> HostGraph:
        assert self.capturing is None
        self.capturing = []
        try:
            work()
            graph = HostGraph(self, self.capturing)
        finally:
            self.capturing = None
        self.graphs.append(graph)
        return graph

    def synchronize(self) -> None:
        assert self.capturing is None, "no wait while a graph is captured"
        queue, self.queue = self.queue, []
        for work in queue:
            work()
        self.syncs.append(self._incoming)
        self._incoming = 0


def _assign(to: Any, values: Any) -> None:
    to[...] = values
