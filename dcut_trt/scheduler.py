"""Who runs in the next step: admission by declared KV headroom, chunked prefill, deadlines, cancellation."""

from __future__ import annotations

import threading
from bisect import insort
from collections import Counter
from dataclasses import dataclass

from dcut_trt.admission import blocks_needed
from dcut_trt.backends.base import Limits
from dcut_trt.errors import DuplicateRequest, QueueFull
from dcut_trt.kv.paged import BlockPool
from dcut_trt.kv.sharing import PrefixSharing
from dcut_trt.sequence import Sequence

AGING_SECONDS = 1.0  # waiting this long counts as much as one more of priority


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
    """One step: those that leave, or else parts of prompts, or else every sequence that decodes."""

    prefill: tuple[PrefillPart, ...]
    decode: tuple[Sequence, ...]
    cancelled: tuple[Sequence, ...]
    expired: tuple[Sequence, ...]


class Scheduler:
    """A request runs once KV blocks for its longest outcome are free, so that no stream can run out of memory later.

    The order of those that wait is by priority + waiting time / AGING_SECONDS. All of them age alike, so it is the
    order of submitted - priority * AGING_SECONDS, which never changes, and a request submitted later than that allows
    cannot go first: nothing starves. Nobody overtakes the first one, even if it waits for more blocks than others.

    add() and cancel() may be called from any thread, the rest from the engine's.
    """

    def __init__(
        self,
        limits: Limits,
        max_queue: int,
        prefill_chunk: int,
        busy_prefill_chunk: int | None = None,
        *,
        prefix_cache: bool = True,
    ) -> None:
        """prefill_chunk: prompt rows of one step; busy_prefill_chunk: at most so many while others decode."""
        self.limits = limits
        self.max_queue = max_queue
        self.prefill_chunk = prefill_chunk
        self.busy_prefill_chunk = min(prefill_chunk, busy_prefill_chunk or prefill_chunk)
        self.pool = BlockPool(limits.num_blocks, limits.block_size)
        self.sharing = PrefixSharing(self.pool, enabled=prefix_cache and limits.shares_blocks)
        self.waiting: list[Sequence] = []
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

    def live(self) -> list[Sequence]:
        """Of all that wait or run."""
        with self._lock:
            return list(self._live.values())

    def add(self, sequence: Sequence, now: float = 0.0) -> None:
        """Queue a sequence that is submitted now. Raises DuplicateRequest or QueueFull."""
        request_id = sequence.request.request_id
        with self._lock:
            if request_id in self._live:
                raise DuplicateRequest(f"request_id={request_id!r} is live already")
            # The queue is what waits behind a full batch; free places do not count against it.
            capacity = self.limits.max_batch + self.max_queue
            if len(self._live) >= capacity:
                raise QueueFull(f"{len(self._live)} requests are live, capacity is {capacity}")
            self._live[request_id] = sequence
            sequence.submitted = now
            insort(self.waiting, sequence, key=_turn)

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
            self._admit(now)
        if cancelled or expired:
            return Batch((), (), cancelled, expired)  # no network runs in this step, so it is nobody's turn
        decode = tuple(sequence for sequence in self.running if sequence.kv_len >= sequence.prompt_length)
        prompts = [sequence for sequence in self.running if sequence.kv_len < sequence.prompt_length]
        self._prefilled_last = bool(prompts) and not (decode and self._prefilled_last)
        if self._prefilled_last:
            rows = self.busy_prefill_chunk if decode else self.prefill_chunk
            return Batch(_share_chunk(prompts, rows), (), (), ())
        return Batch((), decode, (), ())

    def retire(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Take a finished or failed sequence out and free its blocks."""
        with self._lock:
            self._remove(sequence.request.request_id, failed=failed)

    def check_invariants(self) -> None:
        """Blocks add up and have the owners they count; none that is written is shared; a request is in one list."""
        with self._lock:
            self.pool.check_invariants()
            owners = Counter(int(block) for sequence in self.running for block in sequence.block_table)
            for block in range(self.pool.num_blocks):
                assert self.pool.owners(block) == owners[block], "a KV block leaked"
            for sequence in self.running:
                final = self.sharing.final_rows(sequence) // self.limits.block_size
                for block in sequence.block_table[final:].tolist():
                    assert owners[block] == 1, "a KV block that is written has two owners"
                    assert not self.pool.is_cached(block), "a KV block that is written is cached"
            assert len(self._live) == len(self.waiting) + len(self.running), "a request is in no list or in two"

    def _remove(self, request_id: str, *, failed: bool = False) -> Sequence:
        sequence = self._live.pop(request_id)
        self._cancelled.pop(request_id, None)  # a cancel that came too late must not hit the next request of this id
        if len(sequence.block_table) == 0:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.sharing.release(sequence, keep=not failed)
        return sequence

    def _expired(self, now: float) -> list[str]:
        return [
            request_id
            for request_id, sequence in self._live.items()
            if sequence.request.deadline is not None and now >= sequence.request.deadline
        ]

    def _admit(self, now: float) -> None:
        if self.waiting:
            for sequence in self.running:
                self.sharing.offer(sequence)
        while self.waiting and len(self.running) < self.limits.max_batch:
            sequence = self.waiting[0]
            if not self.sharing.allocate(sequence, blocks_needed(sequence.request, self.limits), now):
                return
            self.running.append(self.waiting.pop(0))


def _turn(sequence: Sequence) -> float:
    """Smaller goes first, and the older of two equal ones."""
    return sequence.submitted - sequence.request.priority * AGING_SECONDS


def _share_chunk(prompts: list[Sequence], rows: int) -> tuple[PrefillPart, ...]:
    """Split a chunk: a quarter to the prompt that runs longest, the rest to those with the least left.

    So a short prompt does not wait behind a long one, and no stream of short ones can stop the long one.
    """
    left = [sequence.prompt_length - sequence.kv_len for sequence in prompts]  # [P], in order of admission
    given = [0] * len(prompts)
    given[0] = min(-(-rows // 4), left[0])
    room = rows - given[0]
    for index in sorted(range(len(prompts)), key=left.__getitem__):
        more = min(room, left[index] - given[index])
        given[index] += more
        room -= more
    return tuple(
        PrefillPart(sequence, sequence.kv_len, length)
        for sequence, length in zip(prompts, given, strict=True)
        if length > 0
    )
