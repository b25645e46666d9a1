"""The engine's thread: submissions from anywhere, drain, close, and what happens when a step fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from scripted_runs import Stream, expected, letters_script

from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.errors import DuplicateRequest, EngineUnavailable, InvalidRequest, QueueFull
from dcut_trt.loop import EngineLoop, LoopState
from dcut_trt.types import FinishReason, Request, StepEvent

pytestmark = pytest.mark.timeout(60)

PATIENCE_S = 20.0


class Inbox:
    """Collects what the loop publishes."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self._news = threading.Condition()

    def __call__(self, events: Sequence[StepEvent]) -> None:
        with self._news:
            for event in events:
                self.streams.setdefault(event.request_id, Stream()).add(event)
            self._news.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(condition, PATIENCE_S), "it did not come true in time"

    def ended(self, *request_ids: str) -> Callable[[], bool]:
        def all_ended() -> bool:
            streams = [self.streams.get(request_id, Stream()) for request_id in request_ids]
            return all(stream.finish is not None or stream.error is not None for stream in streams)

        return all_ended

    def begun(self, request_id: str) -> Callable[[], bool]:
        return lambda: request_id in self.streams


@contextmanager
def looping(engine: Engine) -> Iterator[tuple[EngineLoop, Inbox, list[LoopState]]]:
    inbox, states = Inbox(), []
    loop = EngineLoop(engine, inbox, states.append)
    loop.start()
    try:
        yield loop, inbox, states
    finally:
        loop.close()


def endless(**options: Any) -> Engine:
    """An engine whose requests go on for as long as a test needs them to."""
    return scripted_engine("dflash", script=letters_script(1e9), max_len=20_000, delay_s=0.002, **options)


def long_request(name: str) -> Request:
    return Request(name, (65, 66), 10_000, ignore_eos=True)


def test_submissions_from_many_threads_all_finish_with_their_own_output() -> None:
    script = letters_script()
    crowd = [Request(f"r{index}", (65, index), 30) for index in range(60)]
    with looping(scripted_engine("ratio:0.5", script=script)) as (loop, inbox, states):
        threads = [
            threading.Thread(target=lambda share: [loop.submit(request) for request in share], args=(crowd[part::6],))
            for part in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        inbox.wait_until(inbox.ended(*(request.request_id for request in crowd)))
        for request in crowd:
            assert inbox.streams[request.request_id].outcome == expected(script, request)
    assert states == [LoopState.RUNNING, LoopState.CLOSED]


def test_refusals_reach_the_submitting_thread() -> None:
    with looping(endless()) as (loop, _, _):
        with pytest.raises(InvalidRequest):
            loop.submit(Request("r", (), 1))
        loop.submit(long_request("r"))
        with pytest.raises(DuplicateRequest):
            loop.submit(long_request("r"))


def test_an_abort_ends_its_stream_alone() -> None:
    with looping(endless()) as (loop, inbox, _):
        for name in ("a", "b"):
            loop.submit(long_request(name))
        inbox.wait_until(inbox.begun("b"))
        assert loop.abort("a")
        inbox.wait_until(inbox.ended("a"))
        assert inbox.streams["a"].finish is FinishReason.ABORTED
        assert not loop.abort("a")
        assert not loop.abort("never was")
        assert not inbox.ended("b")()


def test_drain_waits_for_live_requests_and_takes_no_more() -> None:
    script = letters_script()
    engine = scripted_engine("dflash", script=script, delay_s=0.01)
    request = Request("r", (65, 66), 30, ignore_eos=True)
    with looping(engine) as (loop, inbox, states):
        loop.submit(request)
        assert loop.drain(PATIENCE_S)
        assert states == [LoopState.RUNNING, LoopState.DRAINING]
        with pytest.raises(EngineUnavailable, match="draining"):
            loop.submit(long_request("late"))
    assert inbox.streams["r"].outcome == expected(script, request)


def test_drain_says_when_time_is_up_and_close_aborts_the_rest() -> None:
    with looping(endless()) as (loop, inbox, _):
        loop.submit(long_request("r"))
        inbox.wait_until(inbox.begun("r"))
        begun = time.monotonic()
        assert not loop.drain(0.05)
        assert time.monotonic() - begun < 5
    assert inbox.streams["r"].finish is FinishReason.ABORTED
    assert loop.state is LoopState.CLOSED
    with pytest.raises(EngineUnavailable, match="closed"):
        loop.submit(long_request("late"))


def test_draining_an_idle_loop_returns_at_once() -> None:
    with looping(endless()) as (loop, _, _):
        assert loop.drain(0.0)


def test_close_aborts_what_waits_and_what_runs() -> None:
    with looping(endless(max_batch=2)) as (loop, inbox, _):
        names = [f"r{index}" for index in range(6)]
        for name in names:
            loop.submit(long_request(name))
        inbox.wait_until(inbox.begun("r0"))
    assert {inbox.streams[name].finish for name in names} == {FinishReason.ABORTED}
    assert not loop.engine.has_work
    assert loop.engine.free_blocks == loop.engine.scheduler.pool.num_blocks
    loop.close()


def test_a_loop_that_was_never_started_takes_nothing_and_closes() -> None:
    loop = EngineLoop(endless(), Inbox())
    with pytest.raises(EngineUnavailable, match="new"):
        loop.submit(long_request("r"))
    loop.close()
    assert loop.state is LoopState.CLOSED


def test_submissions_that_race_with_close_are_refused_or_ended() -> None:
    for _ in range(20):
        taken: list[str] = []
        with looping(endless()) as (loop, inbox, _):

            def flood(loop: EngineLoop = loop, taken: list[str] = taken) -> None:
                for index in range(1000):
                    try:
                        loop.submit(long_request(f"r{index}"))
                    except (EngineUnavailable, QueueFull):
                        return
                    taken.append(f"r{index}")

            thread = threading.Thread(target=flood)
            thread.start()
            time.sleep(0.003)
        thread.join(PATIENCE_S)
        assert inbox.ended(*taken)()


def failing_after(engine: Engine, calls: int, meanwhile: Callable[[], object] = lambda: None) -> Engine:
    """The engine's target raises after this many more calls; meanwhile() runs during the last good one."""
    forward, left = engine.target.forward, iter(range(calls, 0, -1))

    def forward_or_fail(*arguments: Any) -> Any:
        match next(left, 0):
            case 0:
                raise RuntimeError("the device is gone")
            case 1:
                meanwhile()
        return forward(*arguments)

    engine.target.forward = forward_or_fail  # type: ignore[method-assign]
    return engine


def test_a_failing_step_ends_every_stream_with_an_error_and_no_request_is_taken_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = failing_after(endless(max_batch=2), 5)
    with looping(engine) as (loop, inbox, states):
        names = [f"r{index}" for index in range(5)]
        taken = []
        for name in names:
            try:
                loop.submit(long_request(name))
            except EngineUnavailable:
                continue
            taken.append(name)
        assert taken
        inbox.wait_until(inbox.ended(*taken))
        for name in taken:
            assert isinstance(inbox.streams[name].error, EngineUnavailable)
            assert "gone" not in str(inbox.streams[name].error), "what failed is for the log, not for clients"
        with pytest.raises(EngineUnavailable, match="failed"):
            loop.submit(long_request("late"))
        assert isinstance(loop.failure, RuntimeError)
        assert "the device is gone" in caplog.text
        assert loop.drain(PATIENCE_S)
    assert states == [LoopState.RUNNING, LoopState.FAILED]


def test_the_last_events_of_a_failed_loop_tell_usage_and_times() -> None:
    """Of who decodes, who waits, and who ended in the step whose events could not be handed out."""
    engine = endless(max_batch=2)
    inbox = BrokenInbox(lambda event: event.finish is FinishReason.LENGTH)
    loop = EngineLoop(engine, inbox)
    for request in (long_request("decoding"), Request("ended", (65, 66), 20, ignore_eos=True), long_request("waiting")):
        engine.submit(request)
    loop.start()
    inbox.wait_until(inbox.ended("decoding", "ended", "waiting"))
    loop.close()
    for name, output in (("decoding", 2), ("ended", 20), ("waiting", 0)):
        stream = inbox.streams[name]
        assert isinstance(stream.error, EngineUnavailable)
        assert stream.times is not None
        assert stream.usage is not None
        assert stream.usage.prompt_tokens == 2
        assert stream.usage.output_tokens >= output
        assert (stream.times.admitted is None) == (stream.times.first_token is None) == (name == "waiting")
        assert stream.times.finished is not None
        assert stream.times.submitted <= stream.times.finished


def test_a_cancel_before_the_step_that_fails_still_ends_its_stream() -> None:
    engine = endless()
    with looping(engine) as (loop, inbox, _):
        for name in ("a", "b"):
            loop.submit(long_request(name))
        inbox.wait_until(inbox.begun("b"))
        failing_after(engine, 1, lambda: loop.abort("a"))
        inbox.wait_until(inbox.ended("a", "b"))
    assert inbox.streams["a"].finish is FinishReason.ABORTED
    assert isinstance(inbox.streams["b"].error, EngineUnavailable)


def test_a_broken_invariant_is_a_failure_too() -> None:
    engine = scripted_engine("plain", script=letters_script())
    engine.scheduler.pool.allocate(1)
    with looping(engine) as (loop, _, states):
        deadline = time.monotonic() + PATIENCE_S
        while loop.state is not LoopState.FAILED and time.monotonic() < deadline:
            time.sleep(0.005)
    assert isinstance(loop.failure, AssertionError)
    assert states[-1] is LoopState.FAILED


class BrokenInbox(Inbox):
    """Raises once, when it has a stream's first, last or any event; what comes after goes in as usual."""

    def __init__(self, breaks_at: Callable[[StepEvent], bool]) -> None:
        super().__init__()
        self._breaks_at: Callable[[StepEvent], bool] | None = breaks_at

    def __call__(self, events: Sequence[StepEvent]) -> None:
        if self._breaks_at is not None and any(self._breaks_at(event) for event in events):
            self._breaks_at = None
            raise ZeroDivisionError
        super().__call__(events)


@pytest.mark.parametrize(
    "breaks_at", [lambda event: bool(event.tokens), lambda event: event.finish is FinishReason.LENGTH]
)
def test_when_events_cannot_be_handed_out_every_stream_is_told(breaks_at: Callable[[StepEvent], bool]) -> None:
    """Also the stream whose last event was lost: the engine itself does not know it any more."""
    engine, inbox, states = endless(), BrokenInbox(breaks_at), []
    loop = EngineLoop(engine, inbox, states.append)
    names = ["long", "short"]
    loop.start()
    for name, length in zip(names, (10_000, 20), strict=True):
        try:
            loop.submit(Request(name, (65, 66), length, ignore_eos=True))
        except EngineUnavailable:
            names.remove(name)
    inbox.wait_until(inbox.ended(*names))
    loop.close()
    assert all(isinstance(inbox.streams[name].error, EngineUnavailable) for name in names)
    assert states == [LoopState.RUNNING, LoopState.FAILED]


def test_a_stream_that_cannot_be_told_does_not_keep_the_others_from_it() -> None:
    engine, inbox, states = endless(), Inbox(), []

    def publish(events: Sequence[StepEvent]) -> None:
        if any(event.request_id == "deaf" for event in events):
            raise ZeroDivisionError
        inbox(events)

    def on_state(state: LoopState) -> None:
        states.append(state)
        if state is LoopState.FAILED:
            raise ZeroDivisionError

    loop = EngineLoop(engine, publish, on_state)
    for name in ("a", "deaf", "b"):
        engine.submit(long_request(name))
    loop.start()
    inbox.wait_until(inbox.ended("a", "b"))
    loop.close()
    assert states == [LoopState.RUNNING, LoopState.FAILED]


def test_a_listener_of_the_steps_that_raises_ends_no_stream(caplog: pytest.LogCaptureFixture) -> None:
    script = letters_script()
    engine, heard = scripted_engine("ratio:0.5", script=script), []
    engine.trace.listeners += [lambda record, commits: 1 // 0, lambda record, commits: heard.append(record)]
    crowd = [Request(f"r{index}", (65, index), 30) for index in range(3)]
    with looping(engine) as (loop, inbox, _):
        for request in crowd:
            loop.submit(request)
        inbox.wait_until(inbox.ended(*(request.request_id for request in crowd)))
    for request in crowd:
        assert inbox.streams[request.request_id].outcome == expected(script, request)
    assert len(heard) == engine.trace.totals.steps > 10
    assert caplog.text.count("listener of the step trace failed") == 1


def test_a_state_listener_hears_every_change_once() -> None:
    with looping(endless()) as (loop, _, states):
        loop.drain(0.1)
        loop.drain(0.1)
        loop.close()
    assert states == [LoopState.RUNNING, LoopState.DRAINING, LoopState.CLOSED]
