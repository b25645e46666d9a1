"""The one thread that owns the device."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence

from dcut_trt.engine import Engine
from dcut_trt.errors import EngineUnavailable
from dcut_trt.events import fault_event
from dcut_trt.types import Request, StepEvent, Usage

logger = logging.getLogger(__name__)

_NO_USAGE = Usage(0, 0, 0, 0, 0, 0)
_POLL_S = 0.01  # how often drain() looks whether the live requests have ended


class LoopState(enum.Enum):
    """NEW -> RUNNING -> DRAINING -> CLOSED; FAILED from any of them when a step raises."""

    NEW = "new"
    RUNNING = "running"
    DRAINING = "draining"
    CLOSED = "closed"
    FAILED = "failed"


class EngineLoop:
    """Runs engine.step() in a thread while there is work, and hands each step's events to publish().

    publish is called from that thread, once per step, and must not block. When it raises, nobody knows which streams
    got their events, so the loop fails; every stream is then told so, each in a call of its own.
    on_state, when given, is called from the thread that changes the state.
    """

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[Sequence[StepEvent]], None],
        on_state: Callable[[LoopState], None] | None = None,
    ) -> None:
        self.engine = engine
        self.state = LoopState.NEW
        self.failure: Exception | None = None
        self._publish = publish
        self._on_state = on_state
        self._wake = threading.Event()
        self._closing = False
        self._open: set[str] = set()  # streams whose last event has not been handed out
        self._undelivered: dict[str, StepEvent] = {}  # last events that could not be handed out
        # Between the check of the state and the queueing of a request the state must not change: a request queued
        # after the last look at the queue would never get an event.
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="dcut-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; requests are taken from now on."""
        self._set_state(LoopState.RUNNING)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request from any thread.

        Raises InvalidRequest, DuplicateRequest, QueueFull, or EngineUnavailable when not running.
        """
        with self._gate:
            if self.state is not LoopState.RUNNING:
                raise EngineUnavailable(f"the engine is {self.state.value}; no request is taken")
            self.engine.submit(request)
            self._open.add(request.request_id)
        self._wake.set()

    def abort(self, request_id: str) -> bool:
        """End a request before the next step; its stream gets an ABORTED event. False when it is not live."""
        found = self.engine.cancel(request_id)
        self._wake.set()
        return found

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests and wait for the live ones; False when some are left after timeout_s."""
        with self._gate:
            if self.state is LoopState.RUNNING:
                self._set_state(LoopState.DRAINING)
        self._wake.set()
        deadline = time.monotonic() + timeout_s
        while self.engine.has_work and self._thread.is_alive():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _POLL_S))
        return True

    def close(self) -> None:
        """Abort what is live, stop the thread, and wait for it."""
        with self._gate:
            self._closing = True
            if self.state in (LoopState.NEW, LoopState.RUNNING, LoopState.DRAINING):
                self._set_state(LoopState.CLOSED)
        for request_id in self.engine.scheduler.live_ids():
            self.engine.cancel(request_id)
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                if self.engine.has_work:
                    self._hand_out(self.engine.step())
                elif self._closing:
                    return
                else:
                    self._rest()
        except Exception as error:
            logger.exception("the engine loop failed")
            self._fail(error)

    def _hand_out(self, events: Sequence[StepEvent]) -> None:
        ended = {event.request_id for event in events if event.final}
        if ended:
            with self._gate:  # before they are published: a client may use an id again as soon as it sees the end
                self._open -= ended
        try:
            if events:
                self._publish(events)
        except Exception:
            with self._gate:
                self._open |= ended
                self._undelivered = {event.request_id: event for event in events if event.final}
            raise

    def _rest(self) -> None:
        self.engine.scheduler.check_invariants()
        self._wake.wait()
        self._wake.clear()

    def _fail(self, error: Exception) -> None:
        with self._gate:
            self.failure = error
            try:
                self._set_state(LoopState.FAILED)
            except Exception:  # the streams still have to be told
                logger.exception("a listener of the loop's state failed")
            last_events = self._last_events(EngineUnavailable("the engine failed; the log has the details"))
        for event in last_events:
            try:
                self._publish([event])
            except Exception:  # the others still have to be told
                logger.exception("request_id=%r: its stream cannot be ended", event.request_id)

    def _last_events(self, fault: EngineUnavailable) -> list[StepEvent]:
        """One per open stream, with the usage and the times of its request as far as they are known."""
        now = self.engine.clock()
        known = {
            request_id: StepEvent(request_id, (), "", event.usage, error=fault, times=event.times)
            for request_id, event in self._undelivered.items()
        }
        known |= {
            sequence.request.request_id: fault_event(sequence, fault, now) for sequence in self.engine.scheduler.live()
        }
        # A step that raised after it had taken a request out leaves its id alone.
        unknown = [StepEvent(request_id, (), "", _NO_USAGE, error=fault) for request_id in self._open - known.keys()]
        return [*known.values(), *unknown]

    def _set_state(self, state: LoopState) -> None:
        self.state = state
        if self._on_state is not None:
            self._on_state(state)
