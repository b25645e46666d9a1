"""What the server says about itself, from binding to its end: health, state, info, reflection."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from live_server import identity_of, run, serving

from dcut_server.generated.dcut.v1 import dcut_pb2
from dcut_server.lifecycle import DcutServer
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import DcutError
from dcut_trt.spec.cost_table import CostTable


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
