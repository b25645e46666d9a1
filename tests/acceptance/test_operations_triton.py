"""O3, O4: Triton's decoupled mode: one final response in every case, and a cancel is noticed within a step."""

from __future__ import annotations

import asyncio

import grpc
from live_server import nothing_left, run, serving, until
from relay_parts import Recorded, relay
from triton_process import Triton, ask, stream, tensors
from triton_process import until as until_async

from dcut_server.client import DcutClient
from dcut_server.generated.dcut.v1 import dcut_pb2
from dcut_trt.backends.scripted import scripted_engine


def test_o3_o4_one_final_response_in_every_case() -> None:
    async def test() -> None:
        engine = scripted_engine(max_len=4096, delay_s=0.002)
        async with serving(engine) as (server, _):
            relaying = relay.Relay(server.address)
            long = dcut_pb2.GenerateRequest(text="a", max_tokens=4000, ignore_eos=True)
            short = dcut_pb2.GenerateRequest(text="a", max_tokens=5, ignore_eos=True)
            refused = dcut_pb2.GenerateRequest(text="", max_tokens=5)
            done, bad, late, gone, cut = (Recorded() for _ in range(5))
            for request, limit_s, reply in (
                (short, None, done),
                (refused, None, bad),
                (long, 0.05, late),
                (long, None, gone),
                (long, None, cut),
            ):
                relaying.submit(relay.Job(request, True, limit_s, reply))
            await until(lambda: gone.sent > 0 and bool(done.finals and bad.finals and late.finals))
            gone.left = True
            await until(lambda: bool(gone.finals))
            await until(lambda: engine.running == 1)
            await asyncio.to_thread(relaying.close)
            assert [reply.finals for reply in (done, bad, late, gone, cut)] == [
                [5],
                [grpc.StatusCode.INVALID_ARGUMENT],
                [grpc.StatusCode.DEADLINE_EXCEEDED],
                [grpc.StatusCode.CANCELLED],
                [grpc.StatusCode.UNAVAILABLE],
            ]
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_o3_one_final_response_also_for_empty_output(tritonserver: Triton, dcut_address: str) -> None:
    async def test() -> None:
        async with DcutClient(dcut_address) as dcut, tritonserver.client() as client:
            first = (await dcut.complete("empty", max_tokens=1, ignore_eos=True)).token_ids[0]
            for streaming in (True, False):
                answer = await ask(client, "empty", streaming=streaming, stop_token_ids=[first])
                assert (answer.text, answer.last["finish_reason"]) == ("", b"stop")

    run(test)


def test_o4_a_cancelled_stream_frees_its_slot(tritonserver: Triton, dcut_address: str) -> None:
    async def test() -> None:
        async with DcutClient(dcut_address) as dcut, tritonserver.client() as client:
            before = tritonserver.counters()["cancelled"]
            for streaming in (True, False):
                request = tensors("cancelled", streaming=streaming, max_tokens=4000, ignore_eos=True)
                responses = stream(client, request)
                reading = asyncio.create_task(anext(aiter(responses)))

                async def runs() -> bool:
                    return (await dcut.info()).gauges.running == 1

                async def is_free() -> bool:
                    return (await dcut.info()).gauges.running == 0

                await until_async(runs)
                responses.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                finished = (await dcut.info()).totals.output_tokens
                await until_async(is_free)
                assert (await dcut.info()).totals.output_tokens - finished < 2000, "it ran to its end instead"

            async def counted() -> bool:
                return tritonserver.counters()["cancelled"] == before + 2

            await until_async(counted)

    run(test)


def test_o3_several_requests_on_one_stream(tritonserver: Triton) -> None:
    async def test() -> None:
        async with tritonserver.client() as client:
            requests = [tensors("a", max_tokens=tokens, ignore_eos=True) for tokens in (3, 9, 5)]
            finals, tokens = 0, 0
            async for result, error in stream(client, *requests):
                assert error is None
                finals += result.get_response().parameters["triton_final_response"].bool_param
                tokens += result.as_numpy("output_ids").size
            assert (finals, tokens) == (3, 17)

    run(test)
