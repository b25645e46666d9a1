"""What the server says about itself, from binding to its end: health, state, info, reflection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from live_server import encoded, identity_of, nothing_left, run, serving, solo, until

from dcut_server.client import CallFailed, DcutClient
from dcut_server.dcut_service import SERVICE_NAME
from dcut_server.generated.dcut.v1 import dcut_pb2
from dcut_server.host import ServerState
from dcut_server.lifecycle import DcutServer
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.errors import DcutError, StepFailed
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.types import Request

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


def test_not_serving_until_the_engine_is_profiled_and_warm() -> None:
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


def test_a_failed_warm_up_raises_and_never_serves() -> None:
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


def test_a_dead_engine_loop_gives_every_stream_a_status_and_ends_serving() -> None:
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


def test_draining_is_told_and_live_streams_finish() -> None:
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


def test_info_tells_identity_limits_and_live_numbers() -> None:
    async def test() -> None:
        engine = scripted_engine(max_batch=2, max_len=64, max_queue=5)
        async with serving(engine) as (_, client):
            await client.complete("abc", max_tokens=20, ignore_eos=True)
            info = await client.info()
        assert info.version
        assert (info.target.identity, info.drafter.sha256) == ("scripted target", "cd" * 32)
        assert (info.backend, info.precision, info.draft_length, info.policy) == ("scripted", "fp32", 7, "ratio:0.5")
        assert list(info.ratios) == [0.25, 0.5, 0.75, 1.0]
        assert info.limits == dcut_pb2.Limits(max_batch=2, max_len=64, max_queue=5, vocab_size=258)
        assert info.gauges == dcut_pb2.Gauges(free_kv_blocks=engine.scheduler.pool.num_blocks)
        assert (info.totals.requests_finished, info.totals.prompt_tokens, info.totals.output_tokens) == (1, 3, 20)
        assert info.totals.accepted <= info.totals.verified <= info.totals.drafted

    run(test)


def test_the_cost_table_arrives_as_it_is() -> None:
    async def test() -> None:
        engine = scripted_engine()
        async with serving(engine) as (_, client):
            assert (await client.cost_table()).state == "missing"
            costs = np.array([[1.5, 2.5], [3.0, 6.0]])
            engine.cost_table = CostTable(
                (1, 8), (0.5, 1.0), costs, np.array([1.0, 2.0]), "this machine", "2026-11-30T00:00:00+00:00"
            )
            table = await client.cost_table()
        assert (table.state, table.fingerprint) == ("measured", "this machine")
        assert table.measured_at == "2026-11-30T00:00:00+00:00"
        assert list(table.ratios) == [0.5, 1.0]
        assert [(row.batch, list(row.cost_ms), row.plain_ms) for row in table.rows] == [
            (1, [1.5, 2.5], 1.0),
            (8, [3.0, 6.0], 2.0),
        ]

    run(test)


def test_reflection_lists_the_services() -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {"dcut.v1.DcutService", "grpc.health.v1.Health"} <= names

    run(test)


def test_a_taken_port_is_refused_by_name() -> None:
    async def test() -> None:
        engine = scripted_engine()
        async with serving(engine) as (server, _):
            second = DcutServer(identity_of(engine))
            port = int(server.address.rpartition(":")[2])
            with pytest.raises(DcutError, match=f"cannot listen on 127.0.0.1:{port}: .*in use"):
                await second.bind(port=port)

    run(test)
