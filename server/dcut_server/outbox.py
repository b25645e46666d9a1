"""From the engine's thread to the streams: one hop per step, and a bounded mailbox per stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dcut_trt.errors import DuplicateRequest
from dcut_trt.types import FinishReason, RequestTimes, StepEvent, TokenLogprob, Usage

PENDING_PARCELS = 16
"""Steps a stream may lag before its messages are merged: enough for a busy event loop, little for a slow reader."""


@dataclass(slots=True)
class Parcel:
    """One message of a stream: the deltas of `steps` engine steps. finish, matched, times: on the last one only."""

    tokens: list[int] = field(default_factory=list)
    fragments: list[str] = field(default_factory=list)
    steps: int = 0
    usage: Usage | None = None
    finish: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    matched: str | int | None = None
    times: RequestTimes | None = None

    @property
    def text(self) -> str:
        return "".join(self.fragments)

    def add(self, event: StepEvent) -> None:
        self.tokens.extend(event.tokens)
        if event.text:
            self.fragments.append(event.text)
        self.steps += 1
        self.usage = event.usage
        self.finish = event.finish
        self.logprobs.extend(event.logprobs)
        self.matched = event.matched
        self.times = event.times


class Mailbox:
    """Parcels of one stream, for one reader: `async for parcel in mailbox`.

    Ends after the parcel with a finish reason, or raises the stream's error after its last delta. Holds at most
    PENDING_PARCELS parcels, and never more tokens than one request can have.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.final = False
        self._parcels: deque[Parcel] = deque()
        self._error: Exception | None = None
        self._wake = asyncio.Event()
        self._unread = True

    def __aiter__(self) -> Mailbox:
        return self

    async def __anext__(self) -> Parcel:
        while not self._parcels:
            if self._error is not None:
                raise self._error
            if self.final:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._parcels.popleft()

    def __len__(self) -> int:
        return len(self._parcels)

    def put(self, event: StepEvent) -> None:
        """Add one step's event; whatever follows the final one is dropped."""
        if self.final:
            return
        if self._unread and (event.error is None or event.tokens or event.text):
            if len(self._parcels) < PENDING_PARCELS:
                self._parcels.append(Parcel())
            self._parcels[-1].add(event)
        self._end(event.error) if event.final else self._wake.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error that is not one of its events."""
        if not self.final:
            self._end(error)

    def stop_reading(self) -> None:
        """Drop what is pending and what may come; only the final event still counts."""
        self._unread = False
        self._parcels.clear()

    async def wait_final(self) -> None:
        while not self.final:
            self._wake.clear()
            await self._wake.wait()

    @property
    def abandoned(self) -> bool:
        return not self._unread

    def _end(self, error: Exception | None) -> None:
        self.final = True
        self._error = error
        self._wake.set()


class Outbox:
    """The mailboxes of all live requests. Everything but publish and fail_all belongs to the event loop's thread.

    A mailbox whose reader left stays until the engine's final event for it came, so that this event cannot reach a
    new stream under the same id.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._mailboxes: dict[str, Mailbox] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._mailboxes)

    def publish(self, events: Sequence[StepEvent]) -> None:
        """Hand one step's events over to the event loop. Called from the engine's thread."""
        self._loop.call_soon_threadsafe(self._deliver, tuple(events))

    def fail_all(self, error: Exception) -> None:
        """End every open stream with this error. Called from any thread."""
        self._loop.call_soon_threadsafe(self._fail_all, error)

    def is_read(self, request_id: str) -> bool:
        """Whether a stream of that id is live and has a reader."""
        mailbox = self._mailboxes.get(request_id)
        return mailbox is not None and not mailbox.abandoned

    async def open(self, request_id: str) -> Mailbox:
        """A new mailbox. Waits for an abandoned stream of that id to end; raises DuplicateRequest while one is read."""
        while (earlier := self._mailboxes.get(request_id)) is not None:
            if not earlier.abandoned:
                raise DuplicateRequest(f"request_id={request_id!r} is live already")
            await earlier.wait_final()
        mailbox = self._mailboxes[request_id] = Mailbox(request_id)
        self._empty.clear()
        return mailbox

    def discard(self, mailbox: Mailbox) -> None:
        """Forget a mailbox whose request the engine never took."""
        self._mailboxes.pop(mailbox.request_id, None)
        if not self._mailboxes:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Wait until every stream has ended and was read to its end, or given up by its reader."""
        await self._empty.wait()

    def release(self, mailbox: Mailbox) -> bool:
        """The reader is done. True when the engine is not, and the request should be aborted."""
        mailbox.stop_reading()
        if mailbox.final:
            self.discard(mailbox)
        return not mailbox.final

    def _deliver(self, events: Sequence[StepEvent]) -> None:
        for event in events:
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is not None:
                mailbox.put(event)
                self._drop_if_over(mailbox)

    def _fail_all(self, error: Exception) -> None:
        for mailbox in list(self._mailboxes.values()):
            mailbox.fail(error)
            self._drop_if_over(mailbox)

    def _drop_if_over(self, mailbox: Mailbox) -> None:
        if mailbox.final and mailbox.abandoned:
            self.discard(mailbox)
