"""Who runs in the next step: admission by declared KV headroom, chunked prefill, deadlines, cancellation."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from dcut_trt.admission import blocks_needed
from dcut_trt.backends.base import Limits
from dcut_trt.errors import DuplicateRequest, QueueFull
from dcut_trt.kv.paged import BlockPool
from dcut_trt.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Prompt rows start .. start + length - 1 of one sequence."""

    sequence: Sequence
    start: int
    length: int

    @property
    def last(self) -> bool:
        return self.start + self.length == self.sequence.prompt_length


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: either parts of prompts, or every sequence that decodes; and who left before it."""

    prefill: tuple[PrefillPart, ...]
    decode: tuple[Sequence, ...]
    cancelled: tuple[Sequence, ...]
    expired: tuple[Sequence, ...]


class Scheduler:
    """First come, first served; a request runs once KV blocks for its longest outcome are free, so that no stream
    can run out of memory later. add() and cancel() may be called from any thread, the rest from the engine's."""

    def __init__(self, limits: Limits, max_queue: int, prefill_chunk: int) -> None:
        self.limits = limits
        self.max_queue = max_queue
        self.prefill_chunk = prefill_chunk
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._live: dict[str, Sequence] = {}
        self._cancelled: dict[str, None] = {}
        self._prefilled_last = False
        self._lock = threading.Lock()  # held for list work only, never while a network runs

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def live_ids(self) -> list[str]:
        with self._lock:
            return list(self._live)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises DuplicateRequest or QueueFull."""
        request_id = sequence.request.request_id
        with self._lock:
            if request_id in self._live:
                raise DuplicateRequest(f"request_id={request_id!r} is live already")
            # The queue is what waits behind a full batch; free places do not count against it.
            capacity = self.limits.max_batch + self.max_queue
            if len(self._live) >= capacity:
                raise QueueFull(f"{len(self._live)} requests are live, capacity is {capacity}")
            self._live[request_id] = sequence
            self.waiting.append(sequence)

    def cancel(self, request_id: str) -> bool:
        """Mark a request to leave before the next step; False when it is not live."""
        with self._lock:
            if request_id not in self._live:
                return False
            self._cancelled[request_id] = None
            return True

    def schedule(self, now: float) -> Batch:
        """Let leavers go, admit what fits, then take turns: a prefill chunk, a decode step, while both have work."""
        with self._lock:
            cancelled = tuple(self._remove(request_id) for request_id in list(self._cancelled))
            expired = tuple(self._remove(request_id) for request_id in self._expired(now))
            self._admit()
        decode = tuple(sequence for sequence in self.running if sequence.kv_len >= sequence.prompt_length)
        prompts = [sequence for sequence in self.running if sequence.kv_len < sequence.prompt_length]
        self._prefilled_last = bool(prompts) and not (decode and self._prefilled_last)
        if self._prefilled_last:
            return Batch(self._chunks(prompts), (), cancelled, expired)
        return Batch((), decode, cancelled, expired)

    def retire(self, sequence: Sequence) -> None:
        """Take a finished or failed sequence out and free its blocks."""
        with self._lock:
            self._remove(sequence.request.request_id)

    def check_invariants(self) -> None:
        """Free and used blocks add up, no block has two owners, every live request is in one list."""
        with self._lock:
            owned = [int(block) for sequence in self.running for block in sequence.block_table]
            assert len(set(owned)) == len(owned), "a KV block has two owners"
            assert len(owned) + self.pool.free == self.pool.num_blocks, "a KV block leaked"
            assert len(self._live) == len(self.waiting) + len(self.running), "a request is in no list or in two"

    def _remove(self, request_id: str) -> Sequence:
        sequence = self._live.pop(request_id)
        self._cancelled.pop(request_id, None)  # a cancel that came too late must not hit the next request of this id
        if len(sequence.block_table) == 0:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.pool.release(sequence.block_table)
        return sequence

    def _expired(self, now: float) -> list[str]:
        return [
            request_id
            for request_id, sequence in self._live.items()
            if sequence.request.deadline is not None and now >= sequence.request.deadline
        ]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_batch:
            table = self.pool.allocate(blocks_needed(self.waiting[0].request, self.limits))
            if table is None:
                return
            sequence = self.waiting.popleft()
            sequence.block_table = table
            self.running.append(sequence)

    def _chunks(self, prompts: list[Sequence]) -> tuple[PrefillPart, ...]:
        parts: list[PrefillPart] = []
        room = self.prefill_chunk
        for sequence in prompts:
            length = min(room, sequence.prompt_length - sequence.kv_len)
            if length == 0:
                break
            parts.append(PrefillPart(sequence, sequence.kv_len, length))
            room -= length
        return tuple(parts)
