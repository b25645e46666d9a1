"""R7, R10: clients that leave, and Abort: at every stage the slot comes back and nothing of the request stays."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import grpc
import pytest
from live_server import encoded, nothing_left, run, serving, solo, until

from dcut_server.client import CallFailed, DcutClient
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.types import FinishReason, Request


class Gate:
    """Holds the engine's thread inside one stage while the block runs; skip: calls that pass before."""

    def __init__(self, part: Any, method: str, skip: int = 0) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()
        self._part, self._method, self._skip = part, method, skip
        self._inner = getattr(part, method)

    def __enter__(self) -> Gate:
        setattr(self._part, self._method, self._call)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._part, self._method, self._inner)
        self._opened.set()

    def _call(self, *args: Any) -> Any:
        if self._skip:
            self._skip -= 1
        else:
            self.reached.set()
            assert self._opened.wait(10), "nobody opened the gate"
        return self._inner(*args)


STAGES = {
    "prefill": ("target", "forward", 0),
    "draft": ("drafter", "propose", 0),
    "verify": ("target", "forward", 1),
    "streaming": ("target", "forward", 3),
}


@pytest.mark.parametrize("stage", STAGES)
def test_r7_cancel_in_a_stage_frees_the_slot_within_a_step(stage: str) -> None:
    part, method, skip = STAGES[stage]

    async def test() -> None:
        engine = scripted_engine(max_batch=2)
        async with serving(engine) as (server, client):
            for _ in range(150):
                with Gate(getattr(engine, part), method, skip) as gate:
                    stream = asyncio.create_task(client.complete("leaving", ignore_eos=True))
                    await until(gate.reached.is_set)
                    steps = engine.trace.totals.steps
                    stream.cancel()
                    await until(lambda: _abandoned(server))
                await until(lambda: nothing_left(server, engine))
                assert engine.trace.totals.steps <= steps + 1

    run(test)


def _abandoned(server: Any) -> bool:
    return all(mailbox.abandoned for mailbox in server.host.outbox._mailboxes.values())


def test_r7_cancel_in_the_queue_takes_nothing() -> None:
    async def test() -> None:
        engine = scripted_engine(max_batch=1, delay_s=0.005)
        async with serving(engine) as (server, client):
            blocker = asyncio.create_task(client.complete("blocker", max_tokens=100, ignore_eos=True))
            await until(lambda: engine.running == 1)
            queued = asyncio.create_task(client.complete("x" * 50))
            await until(lambda: engine.waiting == 1)
            queued.cancel()
            await until(lambda: engine.waiting == 0, timeout_s=1)
            assert len((await blocker).token_ids) == 100
            await until(lambda: nothing_left(server, engine))
            assert engine.trace.totals.prompt_tokens == len("blocker")

    run(test)


def test_r7_hundreds_of_clients_that_leave_at_random_moments_leave_nothing() -> None:
    async def test() -> None:
        engine = scripted_engine(max_batch=4, max_queue=64, delay_s=0.001)
        chance = random.Random(5)
        async with serving(engine) as (server, client):

            async def come_and_go(index: int) -> None:
                stream = asyncio.create_task(client.complete(f"client {index}" * 5, max_tokens=150, ignore_eos=True))
                await asyncio.sleep(chance.random() * 0.1)
                stream.cancel()

            for wave in range(10):
                await asyncio.gather(*(come_and_go(wave * 40 + index) for index in range(40)))
            await until(lambda: nothing_left(server, engine))
            engine.scheduler.check_invariants()
            answer = await client.complete("after", max_tokens=50, ignore_eos=True)
            assert answer.token_ids == solo(Request("solo", encoded("after"), 50, ignore_eos=True))[0]

    run(test)


def test_r7_a_vanished_connection_is_a_cancel() -> None:
    async def test() -> None:
        engine = scripted_engine(delay_s=0.005)
        async with serving(engine) as (server, _):
            client = DcutClient(server.address)
            stream = client.generate("leaving", ignore_eos=True)
            await anext(stream)
            await client.close()
            await until(lambda: nothing_left(server, engine), timeout_s=1)

    run(test)


def test_r7_leaving_the_iteration_cancels() -> None:
    async def test() -> None:
        engine = scripted_engine(delay_s=0.005)
        async with serving(engine) as (server, client):
            async for _ in client.generate("leaving", ignore_eos=True):
                break
            await until(lambda: nothing_left(server, engine), timeout_s=1)

    run(test)


def test_r7_abort_ends_the_stream_with_its_usage_and_is_idempotent() -> None:
    async def test() -> None:
        engine = scripted_engine(delay_s=0.005)
        async with serving(engine) as (server, client):
            assert not await client.abort("never seen")
            stream = asyncio.create_task(client.complete("a", request_id="mine", ignore_eos=True))
            await until(lambda: engine.trace.totals.output_tokens > 5)
            assert await client.abort("mine")
            answer = await stream
            assert answer.finish is FinishReason.ABORTED
            assert answer.usage.output_tokens == len(answer.token_ids) > 5
            await until(lambda: nothing_left(server, engine))
            assert not await client.abort("mine")

    run(test)


def test_r10_an_id_can_be_used_again_at_once_after_a_cancel() -> None:
    expected = solo(Request("solo", encoded("second"), 30, ignore_eos=True))[0]

    async def test() -> None:
        engine = scripted_engine(max_batch=2, delay_s=0.002)
        async with serving(engine) as (server, client):
            for _ in range(20):
                stream = client.generate("first", request_id="same", ignore_eos=True)
                await anext(stream)
                await stream.aclose()
                answer = await client.complete("second", request_id="same", max_tokens=30, ignore_eos=True)
                assert answer.token_ids == expected
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_r10_an_abort_that_comes_with_the_last_step_does_not_hit_the_next_request_of_that_id() -> None:
    async def test() -> None:
        engine = scripted_engine(max_batch=1)
        async with serving(engine) as (_, client):
            for _ in range(5):
                with Gate(engine.target, "forward") as gate:
                    stream = asyncio.create_task(client.complete("a", request_id="same", max_tokens=1))
                    await until(gate.reached.is_set)
                    await client.abort("same")
                await stream
                answer = await client.complete("a", request_id="same", max_tokens=4, ignore_eos=True)
                assert answer.finish is FinishReason.LENGTH

    run(test)


def test_s7_a_fault_of_one_request_is_told_to_it_alone() -> None:
    async def test() -> None:
        engine = scripted_engine(delay_s=0.005)
        async with serving(engine) as (server, client):
            beside = asyncio.create_task(client.complete("beside", max_tokens=80, ignore_eos=True))
            await until(lambda: engine.running == 1)
            doomed = client.generate("doomed", request_id="doomed", ignore_eos=True)
            await anext(doomed)
            sequence = next(each for each in engine.scheduler.running if each.request.request_id == "doomed")
            sequence.commit = lambda *_: 1 / 0
            with pytest.raises(CallFailed) as caught:
                async for _ in doomed:
                    pass
            assert caught.value.code is grpc.StatusCode.INTERNAL
            assert "Traceback" not in caught.value.details
            assert (await beside).token_ids == solo(Request("solo", encoded("beside"), 80, ignore_eos=True))[0]
            await until(lambda: nothing_left(server, engine))

    run(test)
