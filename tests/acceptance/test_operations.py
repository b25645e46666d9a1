"""O1, O2: what a server says about itself from start to end, and how it fails and stops as a process."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live_server import encoded, identity_of, nothing_left, run, serving, solo, until
from server_process import address_of, process

from dcut_server.client import CallFailed, Chunk, DcutClient
from dcut_server.dcut_service import SERVICE_NAME
from dcut_server.generated.dcut.v1 import dcut_pb2
from dcut_server.host import ServerState
from dcut_server.lifecycle import DcutServer
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.errors import StepFailed
from dcut_trt.types import FinishReason, Request

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(address: str) -> set[int]:
    """The states of the server as a whole and of our service."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", SERVICE_NAME)]
    return {answer.status for answer in answers}


class SlowOpener:
    """Loads an engine when it is told to."""

    def __init__(self, engine: Engine) -> None:
        self.profile = threading.Event()
        self.finish = threading.Event()
        self._engine = engine

    def __call__(self, report: Callable[[ServerState], Any]) -> Engine:
        assert self.profile.wait(10)
        report(ServerState.PROFILING)
        assert self.finish.wait(10)
        return self._engine


def test_o1_not_serving_until_the_engine_is_profiled_and_warm() -> None:
    async def test() -> None:
        engine = scripted_engine()
        opener = SlowOpener(engine)
        server = DcutServer(identity_of(engine))
        await server.bind()
        opening = asyncio.create_task(server.open(opener))
        async with DcutClient(server.address) as client:

            async def refuses_and_is(state: str) -> None:
                assert await health_of(server.address) == {NOT_SERVING}
                info = await client.info()
                assert dcut_pb2.ServerState.Name(info.state) == f"SERVER_STATE_{state}"
                assert info.target.identity == "scripted target"
                for call in (client.complete("early"), client.cost_table()):
                    with pytest.raises(CallFailed) as caught:
                        await call
                    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
                assert not await client.abort("nobody")

            await refuses_and_is("LOADING")
            opener.profile.set()
            await until(lambda: server.host.state is ServerState.PROFILING)
            await refuses_and_is("PROFILING")
            opener.finish.set()
            await opening
            assert await health_of(server.address) == {SERVING}
            assert engine.trace.totals.steps == 0, "the warm-up does not count"
            assert (await client.complete("now", max_tokens=3, ignore_eos=True)).usage.output_tokens == 3
        assert await server.shut_down(1.0, asyncio.Event())

    run(test)


def test_o1_a_failed_warm_up_raises_and_never_serves() -> None:
    async def test() -> None:
        engine = scripted_engine()
        server = DcutServer(identity_of(engine))
        await server.bind()

        def forward(*_: Any) -> Any:
            raise StepFailed("the device is gone")

        engine.target.forward = forward
        with pytest.raises(StepFailed, match="the device is gone"):
            await server.open(lambda _report: engine)
        assert server.host.state is ServerState.FAILED
        assert await health_of(server.address) == {NOT_SERVING}
        await server.shut_down(0.0, asyncio.Event())

    run(test)


def test_o1_a_dead_engine_loop_gives_every_stream_a_status_and_ends_serving() -> None:
    async def test() -> None:
        engine = scripted_engine(max_batch=2, delay_s=0.005)
        async with serving(engine) as (server, client):
            streams = [asyncio.create_task(client.complete(f"p{index}", ignore_eos=True)) for index in range(4)]
            await until(lambda: engine.running == 2 and engine.waiting == 2)
            engine.scheduler.schedule = lambda _: 1 / 0
            for outcome in await asyncio.gather(*streams, return_exceptions=True):
                assert isinstance(outcome, CallFailed)
                assert outcome.code is grpc.StatusCode.UNAVAILABLE
                assert "Traceback" not in outcome.details
            await until(lambda: server.host.state is ServerState.FAILED)
            assert await health_of(server.address) == {NOT_SERVING}
            assert (await client.info()).state == dcut_pb2.SERVER_STATE_FAILED
            with pytest.raises(CallFailed) as caught:
                await client.complete("after")
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert len(server.host.outbox) == 0

    run(test)


def test_o2_draining_is_told_and_live_streams_finish() -> None:
    async def test() -> None:
        engine = scripted_engine(delay_s=0.005)
        async with serving(engine) as (server, client):
            stream = asyncio.create_task(client.complete("live", max_tokens=80, ignore_eos=True))
            await until(lambda: engine.running == 1)
            ending = asyncio.create_task(server.shut_down(10.0, asyncio.Event()))
            await until(lambda: server.host.state is ServerState.DRAINING)
            assert await health_of(server.address) == {NOT_SERVING}
            with pytest.raises(CallFailed) as caught:
                await client.complete("late")
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            assert (await stream).token_ids == solo(Request("solo", encoded("live"), 80, ignore_eos=True))[0]
            assert await ending
            assert nothing_left(server, engine)

    run(test)


async def read(client: DcutClient, chunks: list[Chunk], max_tokens: int) -> None:
    async for chunk in client.generate("a prompt", max_tokens=max_tokens, ignore_eos=True):
        chunks.append(chunk)


def test_o2_sigterm_lets_live_streams_finish_and_refuses_new_ones() -> None:
    with process("0.01", "20") as server:
        address = address_of(server)

        async def test() -> None:
            async with DcutClient(address) as client:
                chunks: list[Chunk] = []
                stream = asyncio.create_task(read(client, chunks, 200))
                while not chunks:
                    await asyncio.sleep(0.01)
                server.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
                with pytest.raises(CallFailed) as caught:
                    await client.complete("too late")
                assert caught.value.code is grpc.StatusCode.UNAVAILABLE
                await stream
                assert chunks[-1].finish is FinishReason.LENGTH
                assert sum(len(chunk.token_ids) for chunk in chunks) == 200

        run(test)
        _, errors = server.communicate(timeout=10)
        assert server.returncode == 0, errors


@pytest.mark.parametrize(("grace_s", "signals"), [("0.2", 1), ("60", 2)])
def test_o2_the_grace_time_and_a_second_signal_cut_streams_with_a_status(grace_s: str, signals: int) -> None:
    with process("0.02", grace_s) as server:
        address = address_of(server)

        async def test() -> None:
            async with DcutClient(address) as client:
                chunks: list[Chunk] = []
                stream = asyncio.create_task(read(client, chunks, 4000))
                while not chunks:
                    await asyncio.sleep(0.01)
                for _ in range(signals):
                    server.send_signal(signal.SIGINT)
                    await asyncio.sleep(0.1)
                with pytest.raises(CallFailed) as caught:
                    await stream
                assert caught.value.code is grpc.StatusCode.UNAVAILABLE
                assert "shutting down" in caught.value.details

        run(test)
        _, errors = server.communicate(timeout=10)
        assert server.returncode == 1
        assert "Traceback" not in errors


@pytest.mark.parametrize("fault", ["mismatch", "warm-up"])
def test_o1_a_failed_start_exits_non_zero_and_never_claims_to_serve(fault: str) -> None:
    with process("0", "1", fault) as server:
        output, _ = server.communicate(timeout=20)
        assert server.returncode not in (0, None)
        assert output == ""
