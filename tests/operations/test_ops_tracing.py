"""Spans as a collector receives them, over OTLP and gRPC."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from live_server import run, until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from operated import operated

from dcut_server.client import CallFailed, DcutClient, build_request
from dcut_server.generated.dcut.v1 import dcut_pb2_grpc
from dcut_server.ops.tracing import trace_requests
from dcut_server.serve_options import ServeOptions
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import UnsupportedOption

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            self.resources.append(attributes(resource.resource))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, start: str) -> list[Any]:
        return [span for span in self.spans if span.name.startswith(start)]


def attributes(thing: Any) -> dict[str, Any]:
    def plain(item: Any) -> Any:
        kind = item.WhichOneof("value")
        return [plain(each) for each in item.array_value.values] if kind == "array_value" else getattr(item, kind)

    return {pair.key: plain(pair.value) for pair in thing.attributes}


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[str, Collector]]:
    server, collector = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}", collector
    finally:
        await server.stop(None)


def test_a_request_joins_its_callers_trace_with_its_phases_steps_and_usage() -> None:
    async def test() -> None:
        async with collecting() as (url, collector):
            options = ServeOptions(port=0, otlp_endpoint=url, trace_sample_rate=1.0)
            async with operated(scripted_engine(delay_s=0.001), options) as running:
                assert running.lines == [f"traces go to {url}"]
                async with grpc.aio.insecure_channel(running.server.address) as channel:
                    stub = dcut_pb2_grpc.DcutServiceStub(channel)
                    request = build_request("a secret prompt", request_id="r1", max_tokens=30, ignore_eos=True)
                    metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
                    messages = [message async for message in stub.Generate(request, metadata=metadata)]
                await until(lambda: bool(running.finals))
            usage = messages[-1].usage
            (root,) = collector.named("text_completion scripted target")
            assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
            told = attributes(root)
            assert told["gen_ai.request.model"] == "scripted target"
            assert told["gen_ai.response.id"] == "r1"
            assert told["gen_ai.response.finish_reasons"] == ["length"]
            assert told["gen_ai.usage.input_tokens"] == usage.prompt_tokens == 15
            assert told["gen_ai.usage.output_tokens"] == usage.output_tokens == 30
            assert told["dcut.draft_tokens.accepted"] == usage.accepted
            assert told["dcut.draft_tokens.proposed"] == usage.drafted
            children = [collector.named(name)[0] for name in ("queue", "prefill", "decode")]
            assert len(collector.spans) == 4
            for child in children:
                assert child.parent_span_id == root.span_id
                assert child.start_time_unix_nano <= child.end_time_unix_nano
            for earlier, later in itertools.pairwise(children):
                assert earlier.end_time_unix_nano == later.start_time_unix_nano
            assert children[0].start_time_unix_nano == root.start_time_unix_nano
            assert children[-1].end_time_unix_nano <= root.end_time_unix_nano
            steps = [attributes(event) for event in root.events]
            assert len(steps) == usage.steps
            assert sum(step["tokens"] for step in steps) == 30
            assert sum(step["accepted"] for step in steps) == usage.accepted
            assert "secret" not in str(collector.spans)
            assert collector.resources[0]["service.name"] == "dcut-trt"

    run(test)


def test_without_a_parent_a_trace_begins_and_unsampled_steps_are_left_out() -> None:
    async def test() -> None:
        async with collecting() as (url, collector):
            async with (
                operated(scripted_engine(), ServeOptions(port=0, otlp_endpoint=url)) as running,
                DcutClient(running.server.address) as client,
            ):
                await asyncio.gather(*(client.complete(f"{index}", max_tokens=9) for index in range(3)))
            roots = collector.named("text_completion")
            assert len({root.trace_id for root in roots}) == 3
            assert not any(root.parent_span_id or root.events for root in roots)

    run(test)


def test_an_error_and_a_request_that_never_ran_are_told() -> None:
    async def test() -> None:
        engine = scripted_engine(max_batch=1, delay_s=0.02)
        async with collecting() as (url, collector):
            async with (
                operated(engine, ServeOptions(port=0, otlp_endpoint=url)) as running,
                DcutClient(running.server.address) as client,
            ):
                first = asyncio.create_task(client.complete("first", ignore_eos=True))
                await until(lambda: engine.running == 1)
                with pytest.raises(CallFailed):
                    await client.complete("second", timeout_s=0.2, request_id="late")
                await until(lambda: any(event.request_id == "late" for event in running.finals))
                first.cancel()
            roots = {attributes(root)["gen_ai.response.id"]: root for root in collector.named("text_completion")}
            late = roots["late"]
            # The deadline's error, or the client's own cancellation: whichever came first.
            assert attributes(late)["gen_ai.response.finish_reasons"] in (["error"], ["aborted"])
            phases = [span.name for span in collector.spans if span.parent_span_id == late.span_id]
            assert phases == ["queue"]

    run(test)


def test_serving_goes_on_without_a_collector() -> None:
    async def test() -> None:
        options = ServeOptions(port=0, otlp_endpoint="http://127.0.0.1:9")
        async with (
            operated(scripted_engine(), options) as running,
            DcutClient(running.server.address) as client,
        ):
            assert len((await client.complete("a", max_tokens=5, ignore_eos=True)).token_ids) == 5

    run(test)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "ftp://x", "http://"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(UnsupportedOption, match=r"otlp_endpoint=.*: must be http://HOST:PORT"):
        trace_requests(endpoint, 0.0)
