"""Who runs: first come first served, as far as places and KV blocks go."""

from __future__ import annotations

import threading

import pytest
from scripted_runs import Stream, checked_step, expected, letters_script, run_all

from dcut_trt.backends.base import Limits
from dcut_trt.backends.scripted import byte_tokenizer, scripted_engine
from dcut_trt.detokenizer import Detokenizer
from dcut_trt.errors import DuplicateRequest, QueueFull
from dcut_trt.scheduler import Batch, Scheduler
from dcut_trt.sequence import Sequence
from dcut_trt.types import Request

LIMITS = Limits(max_batch=2, max_len=64, draft_length=7, vocab_size=258, block_size=16, num_blocks=8, feature_size=2)


def live(name: str, prompt: int = 4, max_tokens: int = 5, deadline: float | None = None) -> Sequence:
    request = Request(name, (1,) * prompt, max_tokens, deadline=deadline)
    return Sequence(request, 0, LIMITS.max_len, (256,), Detokenizer(byte_tokenizer().decode))


def scheduler(max_queue: int = 2, prefill_chunk: int = 8) -> Scheduler:
    return Scheduler(LIMITS, max_queue, prefill_chunk)


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
