"""Requests at the engine (R7, R9, R10, R11): places, ids and memory come back whatever clients do."""

from __future__ import annotations

import random
from itertools import count

import pytest
from scripted_runs import Stream, checked_step, expected, letters, letters_script, run_all

from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.errors import DeadlineExceeded, DuplicateRequest, QueueFull
from dcut_trt.types import FinishReason, Request

POLICIES = ("plain", "dflash", "ratio:0.5")


def assert_empty(engine: Engine) -> None:
    """Nothing of any request is left in any map."""
    scheduler = engine.scheduler
    assert not scheduler.has_work
    assert not any((scheduler.running, scheduler.waiting, scheduler._live, scheduler._cancelled))
    assert not scheduler.sharing._offered
    assert engine.free_blocks == scheduler.pool.num_blocks
    scheduler.check_invariants()


@pytest.mark.parametrize("policy", POLICIES)
def test_r7_a_thousand_cancels_at_random_times_leave_nothing_behind(policy: str) -> None:
    """Queued, in the middle of a prompt, with one token, while decoding, and at the moment of the end."""
    script = letters_script()
    engine = scripted_engine(
        policy, script=script, max_batch=6, max_len=96, block_size=8, num_blocks=50, prefill_chunk=12
    )
    chance = random.Random(policy)
    streams: dict[str, Stream] = {}
    live: list[Request] = []
    cancelled, states = 0, set()
    names = count()
    while cancelled < 1000:
        for _ in range(chance.randint(0, 3)):
            text = "shared " * chance.randint(0, 4) + "x" * chance.randint(1, 30)
            request = Request(f"r{next(names)}", letters(text), chance.randint(1, 40), priority=chance.randint(-2, 2))
            engine.submit(request)
            streams[request.request_id] = Stream()
            live.append(request)
        while len(live) > chance.randint(2, 14):
            request = live.pop(chance.randrange(len(live)))
            if engine.cancel(request.request_id):
                cancelled += 1
                sequence = engine.scheduler._live[request.request_id]
                filled = sequence.kv_len >= sequence.prompt_length
                states.add("queued" if sequence.admitted is None else "decode" if filled else "prompt")
        for event in checked_step(engine):
            streams[event.request_id].add(event)
        live = [request for request in live if request.request_id in engine.scheduler._live]
    for request in live:
        engine.cancel(request.request_id)
    for event in checked_step(engine):
        streams[event.request_id].add(event)
    assert_empty(engine)
    assert states == {"queued", "prompt", "decode"}
    assert sum(stream.finish is FinishReason.ABORTED for stream in streams.values()) >= 1000 * 0.9
    assert all(stream.finish is not None for stream in streams.values())


def test_r9_over_capacity_is_refused_at_once_and_recovers() -> None:
    script = letters_script()
    engine = scripted_engine("dflash", script=script, max_batch=2, max_queue=3)
    crowd = [Request(f"r{index}", letters(f"{index}"), 10) for index in range(6)]
    for request in crowd[:5]:
        engine.submit(request)
    with pytest.raises(QueueFull, match="5 requests are live, capacity is 5"):
        engine.submit(crowd[5])
    engine.cancel("r4")
    checked_step(engine)
    engine.submit(crowd[5])
    streams = {request.request_id: Stream() for request in crowd}
    while engine.has_work:
        for event in checked_step(engine):
            streams[event.request_id].add(event)
    for request in (*crowd[:4], crowd[5]):
        assert streams[request.request_id].outcome == expected(script, request)
    assert_empty(engine)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_r10_a_live_id_is_refused_and_can_be_used_again_after_a_cancel(policy: str, steps: int) -> None:
    script = letters_script(1e9)
    engine = scripted_engine(policy, script=script, prefill_chunk=4)
    first, second = Request("same", letters("the first one"), 40), Request("same", letters("second"), 20)
    engine.submit(first)
    for _ in range(steps):
        checked_step(engine)
    with pytest.raises(DuplicateRequest, match="'same'"):
        engine.submit(second)
    engine.cancel("same")
    with pytest.raises(DuplicateRequest):
        engine.submit(second)
    checked_step(engine)
    assert run_all(engine, second)["same"].outcome == expected(script, second)
    assert_empty(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_r11_a_passed_deadline_frees_its_place_and_one_in_the_queue_is_never_computed(policy: str) -> None:
    script = letters_script(1e9)
    engine = scripted_engine(policy, script=script, max_batch=1)
    now = 0.0
    engine.clock = lambda: now
    running, queued, later = (
        Request("running", letters("running"), 200, deadline=5.0),
        Request("queued", letters("queued"), 200, deadline=5.0),
        Request("later", letters("later"), 10, deadline=100.0),
    )
    streams = {request.request_id: Stream() for request in (running, queued, later)}
    for request in (running, queued, later):
        engine.submit(request)
    while engine.has_work:
        for event in checked_step(engine):
            streams[event.request_id].add(event)
        now += 0.5
    assert isinstance(streams["running"].error, DeadlineExceeded)
    assert isinstance(streams["queued"].error, DeadlineExceeded)
    assert len(streams["running"].tokens) > 5
    assert not streams["queued"].tokens
    assert streams["later"].outcome == expected(script, later)
    assert engine.trace.totals.prompt_tokens == len(running.prompt_ids) + len(later.prompt_ids)
    assert_empty(engine)


def test_a_deadline_in_the_middle_of_a_prompt_stops_its_prefill() -> None:
    engine = scripted_engine("dflash", prefill_chunk=8)
    readings = count()
    engine.clock = lambda: float(next(readings))
    stream = run_all(engine, Request("r", letters("x" * 200), 10, deadline=4.0))["r"]
    assert isinstance(stream.error, DeadlineExceeded)
    assert engine.trace.totals.prompt_tokens == 3 * 8
    assert_empty(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_for_one_or_two_requests_serves_many_and_ends_none_early(policy: str) -> None:
    """Blocks for the longest outcome are taken at admission, so nobody runs out in the middle."""
    script = letters_script(60.0)
    engine = scripted_engine(policy, script=script, max_batch=8, max_len=96, block_size=8, num_blocks=13)
    chance = random.Random(3)
    crowd = [
        Request(f"r{index}", letters("abc" * chance.randint(1, 20)), chance.randint(1, 80), priority=index % 3)
        for index in range(60)
    ]
    streams = run_all(engine, *crowd)
    for request in crowd:
        assert streams[request.request_id].outcome == expected(script, request, 96)
    assert_empty(engine)
