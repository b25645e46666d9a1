"""R1-R4, R9-R11: every refusal of a real server: code, message, and no harm to streams that run meanwhile."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import grpc
import pytest
from live_server import encoded, nothing_left, run, serving, solo, until

from dcut_server.client import CallFailed, DcutClient, Prompt
from dcut_server.generated.dcut.v1 import dcut_pb2, dcut_pb2_grpc
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import InvalidRequest
from dcut_trt.types import Request

MAX_LEN = 128
VOCAB = 258
LONG = [65] * MAX_LEN

# Prompt, options, and what the message must say: field, value, limit.
Refused = tuple[Prompt, dict[str, Any], list[str]]
EMPTY: list[Refused] = [
    ("", {}, ["prompt", "at least 1 token"]),
    ([], {}, ["prompt", "at least 1 token"]),
]
BAD_NUMBERS: list[Refused] = [
    (LONG, {}, ["prompt", "128 tokens", "at most 127 tokens"]),
    ("x" * 5000, {}, ["prompt", "5000 tokens", "at most 127 tokens"]),
    ("a", {"max_tokens": 0}, ["max_tokens", "0", "at least 1"]),
    ("a", {"max_tokens": -5}, ["max_tokens", "-5", "at least 1"]),
    ("a", {"temperature": math.nan}, ["sampling.temperature", "nan", "finite"]),
    ("a", {"temperature": math.inf}, ["sampling.temperature", "inf", "finite"]),
    ("a", {"temperature": -1.0}, ["sampling.temperature", "-1.0", "at least 0"]),
    ("a", {"top_p": 0.0}, ["sampling.top_p", "0.0", "(0, 1]"]),
    ("a", {"top_p": 2.0}, ["sampling.top_p", "2.0", "(0, 1]"]),
    ("a", {"top_p": math.nan}, ["sampling.top_p", "nan", "(0, 1]"]),
    ("a", {"top_k": -1}, ["sampling.top_k", "-1", "at least 1"]),
    ("a", {"seed": -1}, ["sampling.seed", "-1", "[0, 2**63)"]),
    ("a", {"stop": [""]}, ["stop[0]", "0 characters", "1 to 256 characters"]),
    ("a", {"stop": ["ok", "x" * 257]}, ["stop[1]", "257 characters", "1 to 256 characters"]),
    ("a", {"stop": ["x"] * 17}, ["stop", "17 strings", "at most 16"]),
    ("a", {"request_id": "i" * 129}, ["request_id", "129 characters", "at most 128"]),
    ("a", {"min_tokens": -1}, ["min_tokens", "-1"]),
    ("a", {"max_tokens": 4, "min_tokens": 5}, ["min_tokens", "5", "4"]),
    ("a", {"logprobs": -1}, ["logprobs", "-1", "20"]),
    ("a", {"logprobs": 21}, ["logprobs", "21", "20"]),
    ("a", {"priority": -101}, ["priority", "-101", "100"]),
    ("a", {"priority": 2**40}, ["priority", str(2**40), "100"]),
    ("a", {"min_p": -0.1}, ["sampling.min_p", "-0.1"]),
    ("a", {"min_p": 1.1}, ["sampling.min_p", "1.1"]),
    ("a", {"min_p": math.nan}, ["sampling.min_p", "nan"]),
    ("a", {"repetition_penalty": 0.0}, ["sampling.repetition_penalty", "0.0", "2"]),
    ("a", {"repetition_penalty": 2.5}, ["sampling.repetition_penalty", "2.5", "2"]),
    ("a", {"presence_penalty": 2.5}, ["sampling.presence_penalty", "2.5", "2"]),
    ("a", {"presence_penalty": math.nan}, ["sampling.presence_penalty", "nan"]),
    ("a", {"frequency_penalty": -2.5}, ["sampling.frequency_penalty", "-2.5", "2"]),
    ("a", {"logit_bias": {1: 100.5}}, ["sampling.logit_bias", "100.5", "100"]),
    ("a", {"logit_bias": {1: math.nan}}, ["sampling.logit_bias", "nan", "100"]),
]
BAD_IDS: list[Refused] = [
    ([1, -1], {}, ["token_ids[1]", "-1", "[0, 258)"]),
    ([1, VOCAB], {}, ["token_ids[1]", "258", "[0, 258)"]),
    ([2**40], {}, ["token_ids[0]", str(2**40), "[0, 258)"]),
    ([2**32 + 1], {}, ["token_ids[0]", str(2**32 + 1), "[0, 258)"]),
    ("a", {"stop_token_ids": [-1]}, ["stop_token_ids[0]", "-1", "[0, 258)"]),
    ("a", {"stop_token_ids": [3, VOCAB]}, ["stop_token_ids[1]", "258", "[0, 258)"]),
    ("a", {"stop_token_ids": [2**40]}, ["stop_token_ids[0]", str(2**40), "[0, 258)"]),
    ("a", {"logit_bias": {VOCAB: 1.0}}, ["sampling.logit_bias", "258", "[0, 258)"]),
    ("a", {"logit_bias": {-1: 1.0}}, ["sampling.logit_bias", "-1", "[0, 258)"]),
]


BAD_STREAM_COUNTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"n": 0}, ["n=0", "[1, 16]"]),
    ({"n": 17}, ["n=17", "[1, 16]"]),
    ({"n": 2, "seed": 2**63 - 1}, ["sampling.seed", str(2**63 - 1), "2**63 - 2"]),
    ({"n": 2, "temperature": -1.0}, ["sampling.temperature", "-1.0"]),
]


async def refusal(client: DcutClient, prompt: Prompt, **options: Any) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await client.complete(prompt, **options)
    assert "Traceback" not in caught.value.details
    return caught.value


def refused_beside_streams(bad: list[Refused]) -> None:
    """Every one is refused by name, and three streams that run meanwhile give what they give alone."""

    async def test() -> None:
        engine = scripted_engine(max_len=MAX_LEN, delay_s=0.002)
        async with serving(engine) as (server, client):
            prompts = ["one", "two", "three"]
            streams = [
                asyncio.create_task(client.complete(prompt, max_tokens=100, ignore_eos=True)) for prompt in prompts
            ]
            await until(lambda: engine.running == len(prompts))
            for prompt, options, words in bad:
                error = await refusal(client, prompt, **options)
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT, (prompt, options)
                assert not [word for word in words if word not in error.details], error.details
            for prompt, stream in zip(prompts, streams, strict=True):
                ids, text, finish = solo(Request("solo", encoded(prompt), 100, ignore_eos=True), max_len=MAX_LEN)
                answer = await stream
                assert (answer.token_ids, answer.text, answer.finish) == (ids, text, finish)
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_r1_an_empty_prompt_is_refused_and_streams_beside_it_are_unharmed() -> None:
    refused_beside_streams(EMPTY)


def test_r2_numbers_out_of_range_are_refused_by_name_value_and_limit() -> None:
    refused_beside_streams(BAD_NUMBERS)


def test_r3_ids_outside_the_vocabulary_are_refused_and_touch_no_neighbours_row() -> None:
    refused_beside_streams(BAD_IDS)


def test_r4_a_bad_number_of_streams_is_named() -> None:
    async def test() -> None:
        engine = scripted_engine()
        async with serving(engine) as (server, client):
            for options, words in BAD_STREAM_COUNTS:
                with pytest.raises(CallFailed) as caught:
                    async for _ in client.generate("a", **options):
                        pass
                assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
                assert not [word for word in words if word not in caught.value.details], caught.value.details
            with pytest.raises(InvalidRequest, match="generate"):
                await client.complete("a", n=2)
            assert nothing_left(server, engine)

    run(test)


def test_r2_the_client_refuses_what_the_wire_cannot_carry() -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (_, client):
            for options in ({"seed": 2**64}, {"max_tokens": "many"}, {"stop": ["\udcff"]}):
                with pytest.raises(InvalidRequest, match="cannot be sent"):
                    await client.complete("a", **options)

    run(test)


def test_r1_a_request_without_input_and_a_chat_without_messages_are_refused() -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
            stub = dcut_pb2_grpc.DcutServiceStub(channel)
            for request, word in (
                (dcut_pb2.GenerateRequest(), "input"),
                (dcut_pb2.GenerateRequest(chat=dcut_pb2.Chat()), "chat.messages"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Generate(request).read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert word in caught.value.details()

    run(test)


def test_r2_an_option_of_a_newer_contract_is_refused_not_ignored() -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
            call = channel.unary_stream("/dcut.v1.DcutService/Generate")
            known = dcut_pb2.GenerateRequest(text="a").SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(known + b"\xf8\x06\x01").read()  # field 111, varint 1
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "111" in caught.value.details()

    run(test)


def test_r9_one_over_capacity_is_refused_at_once_and_the_server_recovers() -> None:
    async def test() -> None:
        engine = scripted_engine(max_batch=2, max_queue=3, delay_s=0.01)
        async with serving(engine) as (server, client):
            streams = [
                asyncio.create_task(client.complete(f"p{index}", max_tokens=60, ignore_eos=True)) for index in range(5)
            ]
            await until(lambda: engine.running + engine.waiting == 5)
            begun = time.monotonic()
            error = await refusal(client, "one more")
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert time.monotonic() - begun < 0.5
            answers = await asyncio.gather(*streams)
            assert [len(answer.token_ids) for answer in answers] == [60] * 5
            assert (await client.complete("again", max_tokens=3, ignore_eos=True)).usage.output_tokens == 3
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_r10_a_duplicate_id_is_refused_and_the_first_stream_goes_on() -> None:
    async def test() -> None:
        engine = scripted_engine(delay_s=0.005)
        async with serving(engine) as (server, client):
            first = asyncio.create_task(client.complete("first", request_id="same", max_tokens=60, ignore_eos=True))
            await until(lambda: engine.running == 1)
            error = await refusal(client, "second", request_id="same")
            assert error.code is grpc.StatusCode.ALREADY_EXISTS
            assert "same" in error.details
            assert (await first).token_ids == solo(Request("solo", encoded("first"), 60, ignore_eos=True))[0]
            again = await client.complete("second", request_id="same", max_tokens=10, ignore_eos=True)
            assert again.token_ids == solo(Request("solo", encoded("second"), 10, ignore_eos=True))[0]
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_r11_a_deadline_frees_the_slot() -> None:
    async def test() -> None:
        engine = scripted_engine(max_batch=1, delay_s=0.02)
        async with serving(engine) as (server, client):
            begun = time.monotonic()
            error = await refusal(client, "slow", timeout_s=0.2, ignore_eos=True)
            assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert time.monotonic() - begun < 1.0
            await until(lambda: nothing_left(server, engine), timeout_s=0.5)

    run(test)


def test_r11_a_deadline_that_passes_in_the_queue_never_reaches_the_model() -> None:
    async def test() -> None:
        engine = scripted_engine(max_batch=1, delay_s=0.01)
        async with serving(engine) as (server, client):
            blocker = asyncio.create_task(client.complete("blocker", max_tokens=200, ignore_eos=True))
            await until(lambda: engine.running == 1)
            error = await refusal(client, "x" * 100, timeout_s=0.1)
            assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: engine.waiting == 0, timeout_s=0.5)
            await blocker
            await until(lambda: nothing_left(server, engine))
            assert engine.trace.totals.prompt_tokens == len("blocker")

    run(test)
