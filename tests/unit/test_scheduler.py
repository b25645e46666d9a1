"""Who runs: by priority and arrival, as far as places and KV blocks go; and how prompts share a chunk."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_runs import Stream, checked_step, expected, letters_script, run_all

from dcut_trt.backends.base import Limits
from dcut_trt.backends.scripted import byte_tokenizer, scripted_engine
from dcut_trt.detokenizer import Detokenizer
from dcut_trt.errors import DuplicateRequest, QueueFull
from dcut_trt.scheduler import AGING_SECONDS, Batch, Scheduler
from dcut_trt.sequence import Sequence
from dcut_trt.types import Request

LIMITS = Limits(max_batch=2, max_len=64, draft_length=7, vocab_size=258, block_size=16, num_blocks=8, feature_size=2)


def live(name: str, prompt: int = 4, max_tokens: int = 5, deadline: float | None = None, priority: int = 0) -> Sequence:
    request = Request(name, (1,) * prompt, max_tokens, deadline=deadline, priority=priority)
    return Sequence(request, 0, LIMITS.max_len, (256,), Detokenizer(byte_tokenizer().decode))


def scheduler(max_queue: int = 2, prefill_chunk: int = 8, busy: int | None = None) -> Scheduler:
    return Scheduler(LIMITS, max_queue, prefill_chunk, busy)


def names(sequences: tuple[Sequence, ...]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]


def compute(batch: Batch) -> None:
    """What the engine does to the state that the scheduler looks at."""
    for part in batch.prefill:
        part.sequence.kv_len += part.length


def parts(batch: Batch) -> list[tuple[str, int, int, bool]]:
    return [(part.sequence.request.request_id, part.start, part.length, part.last) for part in batch.prefill]


def test_requests_beyond_places_and_queue_are_refused_and_room_comes_back() -> None:
    queue = scheduler(max_queue=1)
    for name in ("a", "b", "c"):
        queue.add(live(name))
    with pytest.raises(QueueFull, match="3 requests are live, capacity is 3"):
        queue.add(live("d"))
    queue.cancel("b")
    queue.schedule(0.0)
    queue.add(live("d"))
    assert sorted(queue.live_ids()) == ["a", "c", "d"]


def test_a_live_id_is_refused_while_it_waits_and_while_it_runs() -> None:
    queue = scheduler()
    queue.add(live("a"))
    with pytest.raises(DuplicateRequest, match="'a'"):
        queue.add(live("a"))
    queue.schedule(0.0)
    with pytest.raises(DuplicateRequest, match="'a'"):
        queue.add(live("a"))
    queue.retire(queue.running[0])
    queue.add(live("a"))


def test_a_chunk_is_filled_in_order_of_arrival_and_ends_inside_a_prompt() -> None:
    queue = scheduler(prefill_chunk=8)
    queue.add(live("a", prompt=5))
    queue.add(live("b", prompt=12))
    first = queue.schedule(0.0)
    assert parts(first) == [("a", 0, 5, True), ("b", 0, 3, False)]
    compute(first)
    second = queue.schedule(0.0)
    assert (names(second.decode), second.prefill) == (["a"], ())
    third = queue.schedule(0.0)
    assert parts(third) == [("b", 3, 8, False)]
    compute(third)
    assert names(queue.schedule(0.0).decode) == ["a"]
    last = queue.schedule(0.0)
    assert parts(last) == [("b", 11, 1, True)]
    compute(last)
    assert names(queue.schedule(0.0).decode) == ["a", "b"]


def test_a_request_waits_for_blocks_and_nobody_overtakes_it() -> None:
    queue = scheduler()
    queue.add(live("big", prompt=50, max_tokens=10))  # 5 of 8 blocks
    queue.add(live("big too", prompt=50, max_tokens=10))
    queue.add(live("small", max_tokens=1))
    queue.schedule(0.0)
    assert names(tuple(queue.running)) == ["big"]
    assert names(tuple(queue.waiting)) == ["big too", "small"]
    queue.check_invariants()
    queue.retire(queue.running[0])
    queue.schedule(0.0)
    assert names(tuple(queue.running)) == ["big too", "small"]
    queue.check_invariants()


def test_the_larger_priority_goes_first_and_among_equals_the_older() -> None:
    queue = scheduler(max_queue=8)
    for name, priority in (("a", 0), ("b", -1), ("c", 5), ("d", 0), ("e", 5)):
        queue.add(live(name, priority=priority), now=1.0)
    assert names(tuple(queue.waiting)) == ["c", "e", "a", "d", "b"]


def test_waiting_makes_up_for_priority() -> None:
    queue = scheduler(max_queue=8)
    queue.add(live("old"), now=0.0)
    queue.add(live("in time", priority=10), now=10 * AGING_SECONDS - 0.1)
    queue.add(live("too late", priority=10), now=10 * AGING_SECONDS + 0.1)
    assert names(tuple(queue.waiting)) == ["in time", "old", "too late"]


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(-20, 100), st.floats(0, 50)), min_size=1, max_size=20))
def test_nobody_starves_whatever_priorities_arrive(crowd: list[tuple[int, float]]) -> None:
    """There is one place; every second it is given away, and one more of the highest priority arrives."""
    queue = Scheduler(replace(LIMITS, max_batch=1), 1000, 8)
    for index, (priority, submitted) in enumerate(sorted(crowd, key=lambda pair: pair[1])):
        queue.add(live(f"r{index}", priority=priority), submitted)
    now, urgent = 50.0, 0
    while any(name.startswith("r") for name in queue.live_ids()):
        queue.add(live(f"urgent {now}", priority=100), now)
        queue.schedule(now)
        urgent += queue.running[0].request.request_id.startswith("urgent")
        queue.retire(queue.running[0])
        now += 1.0
    latest = 50 + 20 * AGING_SECONDS  # the last of the others to go; of the urgent ones, those before it in line
    assert urgent <= latest + 100 * AGING_SECONDS - 50 + 1


def test_a_request_that_waits_for_blocks_is_not_passed_by_a_smaller_one_of_the_same_priority_ever() -> None:
    queue = scheduler(max_queue=40)
    queue.add(live("running", prompt=20, max_tokens=20), 0.0)
    queue.schedule(0.0)
    queue.add(live("big", prompt=50, max_tokens=14), 1.0)  # 5 of 8 blocks, of which 3 are taken
    for index in range(30):
        queue.add(live(f"small {index}", max_tokens=1), 2.0 + index)
        queue.schedule(2.0 + index)
        assert names(tuple(queue.running)) == ["running", "big"]
    assert names(tuple(queue.waiting))[0] == "small 0"


def test_a_chunk_is_smaller_while_streams_wait_for_it() -> None:
    queue = scheduler(prefill_chunk=16, busy=4)
    queue.add(live("a", prompt=20))
    first = queue.schedule(0.0)
    assert parts(first) == [("a", 0, 16, False)]
    compute(first)
    compute(queue.schedule(0.0))
    queue.add(live("b", prompt=10))
    kinds = []
    while queue.running[-1].request.request_id != "b" or queue.running[-1].kv_len < 10:
        batch = queue.schedule(0.0)
        kinds.append("decode" if batch.decode else sum(part.length for part in batch.prefill))
        compute(batch)
    assert kinds == ["decode", 4, "decode", 4, "decode", 2]


def test_leavers_cost_a_stream_no_turn() -> None:
    """Between two decode steps runs at most one chunk, whoever comes and goes."""
    engine = scripted_engine("plain", prefill_chunk=16, busy_prefill_chunk=4, mean_length=1e9)
    engine.submit(Request("streaming", (65,), 200))
    checked_step(engine)
    engine.submit(Request("long", (65,) * 60, 5))
    engine.trace.reset()
    for index in range(40):
        engine.submit(Request(f"r{index}", (65,), 5))
        if index % 2:
            engine.cancel(f"r{index}")
        checked_step(engine)
    kinds = [(record.kind, record.rows) for record in engine.trace.records]
    assert len(kinds) == 20
    assert all("decode" in (before, after) for (before, _), (after, _) in pairwise(kinds))
    assert max(rows for kind, rows in kinds if kind == "prefill") == 4


def test_a_short_prompt_does_not_wait_behind_a_long_one_which_goes_on_meanwhile() -> None:
    queue = scheduler(prefill_chunk=8)
    queue.add(live("long", prompt=50))
    compute(queue.schedule(0.0))
    queue.add(live("short", prompt=6))
    batch = queue.schedule(0.0)
    assert parts(batch) == [("long", 8, 2, False), ("short", 0, 6, True)]


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), chunk=st.integers(1, 20), new=st.integers(1, 6))
def test_chunks_are_full_and_the_oldest_prompt_has_a_quarter_of_each(lengths: list[int], chunk: int, new: int) -> None:
    """Short prompts come in for ever; still the first prompt is through after four times the chunks it needs."""
    limits = Limits(
        max_batch=9, max_len=64, draft_length=7, vocab_size=258, block_size=16, num_blocks=64, feature_size=2
    )
    queue = Scheduler(limits, 10_000, chunk)
    for index, length in enumerate(lengths):
        queue.add(live(f"r{index}", prompt=length))
    arrivals = 0
    for _ in range(-(-lengths[0] // -(-chunk // 4))):
        batch = queue.schedule(0.0)
        waiting = sum(sequence.prompt_length - sequence.kv_len for sequence in queue.running)
        assert sum(part.length for part in batch.prefill) == min(chunk, waiting)
        assert len({part.sequence for part in batch.prefill}) == len(batch.prefill)
        compute(batch)
        if queue.running[0].request.request_id != "r0" or queue.running[0].kv_len == lengths[0]:
            return
        for sequence in [part.sequence for part in batch.prefill if part.last]:
            queue.retire(sequence)
            queue.add(live(f"new {arrivals}", prompt=new))
            arrivals += 1
    raise AssertionError("the first prompt is not through")


def test_deadlines_end_waiting_and_running_requests_at_their_time() -> None:
    queue = scheduler()
    for name, deadline in (("a", 5.0), ("b", None), ("c", 3.0)):
        queue.add(live(name, deadline=deadline))
    assert names(queue.schedule(2.9).expired) == []
    assert names(queue.schedule(3.0).expired) == ["c"]
    assert names(queue.schedule(5.0).expired) == ["a"]
    assert queue.live_ids() == ["b"]
    queue.check_invariants()


def test_cancelled_and_expired_at_once_leaves_once() -> None:
    queue = scheduler()
    queue.add(live("a", deadline=1.0))
    assert queue.cancel("a")
    assert queue.cancel("a")
    batch = queue.schedule(2.0)
    assert (names(batch.cancelled), names(batch.expired)) == (["a"], [])
    assert not queue.cancel("a")
    assert not queue.has_work


def test_a_leaked_block_is_noticed() -> None:
    queue = scheduler()
    queue.add(live("a"))
    queue.schedule(0.0)
    queue.pool.allocate(1)
    with pytest.raises(AssertionError, match="leaked"):
        queue.check_invariants()


def test_requests_from_many_threads_are_each_queued_or_refused() -> None:
    queue = scheduler(max_queue=48)
    refused: list[str] = []

    def add(first: int) -> None:
        for index in range(first, first + 20):
            try:
                queue.add(live(f"r{index}"))
            except (QueueFull, DuplicateRequest):
                refused.append(f"r{index}")

    threads = [threading.Thread(target=add, args=(10 * number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(queue.live_ids()) == len(set(queue.live_ids())) == 50
    assert len(refused) == 70
    queue.check_invariants()


def test_a_full_pool_makes_requests_wait_and_all_of_them_finish() -> None:
    script = letters_script()
    engine = scripted_engine("ratio:0.5", script=script, max_len=64, num_blocks=7, block_size=16)
    crowd = [Request(f"r{index}", (65, index), 50) for index in range(9)]  # 4 blocks each: one runs at a time
    streams = run_all(engine, *crowd)
    for request in crowd:
        assert streams[request.request_id].outcome == expected(script, request)


def test_ten_rounds_over_capacity_recover() -> None:
    script = letters_script()
    engine = scripted_engine("dflash", script=script, max_batch=2, max_queue=1)
    for attempt in range(10):
        crowd = [Request(f"{attempt}.{index}", (65, attempt), 10) for index in range(4)]
        for request in crowd[:3]:
            engine.submit(request)
        with pytest.raises(QueueFull):
            engine.submit(crowd[3])
        streams = {request.request_id: Stream() for request in crowd[:3]}
        while engine.has_work:
            for event in checked_step(engine):
                streams[event.request_id].add(event)
        for request in crowd[:3]:
            assert streams[request.request_id].outcome == expected(script, request)
