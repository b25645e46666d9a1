"""Mailboxes: order, merging, ends, and ids that come again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut_server.outbox import PENDING_PARCELS, Mailbox, Outbox, Parcel
from dcut_trt.errors import DuplicateRequest, StepFailed
from dcut_trt.types import FinishReason, StepEvent, Usage

USAGE = Usage(1, 2, 3, 4, 5, 6)


def event(
    tokens: tuple[int, ...] = (1,),
    text: str = "a",
    finish: FinishReason | None = None,
    error: Exception | None = None,
    request_id: str = "r",
) -> StepEvent:
    return StepEvent(request_id, tokens, text, USAGE, finish, error)


def run(test: Callable[[], Awaitable[Any]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), timeout=10)

    asyncio.run(limited())


async def drain(mailbox: Mailbox) -> list[Parcel]:
    return [parcel async for parcel in mailbox]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=4), st.text(max_size=3)), min_size=1, max_size=60))
def test_nothing_is_lost_or_reordered_and_memory_is_bounded(steps: list[tuple[list[int], str]]) -> None:
    async def test() -> None:
        mailbox = Mailbox("r")
        for index, (tokens, text) in enumerate(steps):
            finish = FinishReason.STOP if index == len(steps) - 1 else None
            mailbox.put(event(tuple(tokens), text, finish))
            assert len(mailbox) <= PENDING_PARCELS
        parcels = await drain(mailbox)
        assert [token for parcel in parcels for token in parcel.tokens] == [t for tokens, _ in steps for t in tokens]
        assert "".join(parcel.text for parcel in parcels) == "".join(text for _, text in steps)
        assert sum(parcel.steps for parcel in parcels) == len(steps)
        assert [parcel.finish for parcel in parcels] == [None] * (len(parcels) - 1) + [FinishReason.STOP]
        if len(steps) <= PENDING_PARCELS:
            assert [parcel.steps for parcel in parcels] == [1] * len(steps)

    run(test)


def test_a_waiting_reader_wakes_for_each_event() -> None:
    async def test() -> None:
        mailbox = Mailbox("r")
        for number in range(3):
            reading = asyncio.create_task(anext(mailbox))
            await asyncio.sleep(0)
            mailbox.put(event((number,)))
            assert (await reading).tokens == [number]

    run(test)


def test_an_error_comes_after_the_deltas_before_it() -> None:
    async def test() -> None:
        mailbox = Mailbox("r")
        mailbox.put(event((1,)))
        mailbox.put(event((2,), error=StepFailed("broken")))
        mailbox.put(event((3,)))
        assert [(await anext(mailbox)).tokens for _ in range(2)] == [[1], [2]]
        with pytest.raises(StepFailed, match="broken"):
            await anext(mailbox)

    run(test)


def test_an_error_without_a_delta_makes_no_message() -> None:
    async def test() -> None:
        mailbox = Mailbox("r")
        mailbox.put(event((), "", error=StepFailed("broken")))
        assert len(mailbox) == 0
        with pytest.raises(StepFailed):
            await anext(mailbox)

    run(test)


def test_one_hop_per_step_from_another_thread() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        outbox, hops = Outbox(loop), 0
        mailboxes = [await outbox.open(name) for name in "abc"]
        schedule = loop.call_soon_threadsafe

        def counted(*arguments: Any) -> Any:
            nonlocal hops
            hops += 1
            return schedule(*arguments)

        loop.call_soon_threadsafe = counted
        step = [event(finish=FinishReason.STOP, request_id=name) for name in "abc"]
        thread = threading.Thread(target=outbox.publish, args=(step,))
        thread.start()
        thread.join()
        loop.call_soon_threadsafe = schedule
        assert [len(await drain(mailbox)) for mailbox in mailboxes] == [1, 1, 1]
        assert hops == 1
        assert not any(outbox.release(mailbox) for mailbox in mailboxes)
        assert len(outbox) == 0
        await outbox.wait_empty()

    run(test)


def test_an_id_that_is_read_cannot_be_opened_again() -> None:
    async def test() -> None:
        outbox = Outbox(asyncio.get_running_loop())
        await outbox.open("r")
        with pytest.raises(DuplicateRequest, match="'r'"):
            await outbox.open("r")

    run(test)


def test_the_end_of_an_abandoned_stream_does_not_reach_the_next_one() -> None:
    async def test() -> None:
        outbox = Outbox(asyncio.get_running_loop())
        first = await outbox.open("r")
        assert outbox.release(first), "the engine still runs it"
        opening = asyncio.create_task(outbox.open("r"))
        await asyncio.sleep(0)
        outbox.publish([event((1,))])
        await asyncio.sleep(0.01)
        assert not opening.done()
        outbox.publish([event((), "", FinishReason.ABORTED)])
        second = await opening
        outbox.publish([event((7,), "b", FinishReason.STOP)])
        assert [parcel.tokens for parcel in await drain(second)] == [[7]]
        assert not outbox.release(second)
        assert len(outbox) == 0

    run(test)


def test_fail_all_ends_every_stream_once() -> None:
    async def test() -> None:
        outbox = Outbox(asyncio.get_running_loop())
        read, left, over = [await outbox.open(name) for name in ("read", "left", "over")]
        outbox.publish([event(request_id="read"), event(request_id="over", finish=FinishReason.STOP)])
        outbox.release(left)
        outbox.fail_all(StepFailed("gone"))
        outbox.publish([event(request_id="read", finish=FinishReason.ABORTED)])
        assert (await anext(read)).finish is None
        with pytest.raises(StepFailed, match="gone"):
            await anext(read)
        assert (await drain(over))[-1].finish is FinishReason.STOP
        assert not outbox.release(read)
        assert not outbox.release(over)
        await outbox.wait_empty()

    run(test)


def test_events_of_unknown_requests_are_dropped() -> None:
    async def test() -> None:
        outbox = Outbox(asyncio.get_running_loop())
        outbox.publish([event(request_id="nobody")])
        await asyncio.sleep(0)
        assert len(outbox) == 0

    run(test)
