"""R4, R5, R8: n streams of one call are each as if alone, and what a stream carries is whole, for slow readers too."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from live_server import encoded, nothing_left, run, serving, solo, until

from dcut_server import outbox
from dcut_server.client import CallFailed, Chunk, DcutClient, build_request
from dcut_server.dcut_service import DcutServicer
from dcut_server.fan_out import fan_out
from dcut_trt.backends.scripted import byte_tokenizer, scripted_engine
from dcut_trt.errors import InvalidRequest
from dcut_trt.types import FinishReason, Request, SamplingParams

ENDLESS = {"ignore_eos": True, "max_tokens": 4000}


async def streams(client: DcutClient, prompt: str, **options: Any) -> list[list[Chunk]]:
    found: dict[int, list[Chunk]] = {}
    async for chunk in client.generate(prompt, **options):
        found.setdefault(chunk.index, []).append(chunk)
    return [found[index] for index in sorted(found)]


def ids_of(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


@pytest.mark.parametrize("count", [1, 3, 16])
def test_r4_stream_i_is_the_single_request_with_seed_plus_i(count: int) -> None:
    async def test() -> None:
        engine = scripted_engine()
        async with serving(engine) as (server, client):
            options = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 2**63 - 40, "logprobs": 1}
            found = await streams(client, "abc", request_id="mine", n=count, **options)
            assert len(found) == count
            for index, chunks in enumerate(found):
                sampling = SamplingParams(1.0, seed=2**63 - 40 + index)
                wanted = solo(Request("solo", encoded("abc"), 40, sampling, ignore_eos=True))
                assert (ids_of(chunks), "".join(chunk.text for chunk in chunks), chunks[-1].finish) == wanted
                assert {chunk.request_id for chunk in chunks} == {"mine"}
                usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
                assert [(usage.prompt_tokens, usage.output_tokens) for usage in usages] == [(3, 40)]
                assert tuple(entry.token_id for chunk in chunks for entry in chunk.logprobs) == wanted[0]
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_r4_streams_without_a_seed_differ_and_greedy_ones_do_not() -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (_, client):
            for temperature, kinds in ((1.0, 4), (0.0, 1)):
                found = await streams(client, "a", n=4, max_tokens=30, ignore_eos=True, temperature=temperature)
                assert len({ids_of(chunks) for chunks in found}) == kinds

    run(test)


def test_r4_none_is_admitted_unless_all_are() -> None:
    async def test() -> None:
        engine = scripted_engine(max_batch=1, max_queue=3, max_len=4096, delay_s=0.002)
        async with serving(engine) as (server, client):
            blocker = asyncio.create_task(client.complete("b", request_id="b", **ENDLESS))
            await until(lambda: engine.running == 1)
            with pytest.raises(CallFailed) as caught:
                await streams(client, "a", request_id="group", n=5, **ENDLESS)
            assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            await until(lambda: engine.waiting == 0)
            assert engine.running == 1
            assert not await client.abort("group")
            assert await client.abort("b")
            assert (await blocker).finish is FinishReason.ABORTED
            again = await streams(client, "a", request_id="group", n=3, max_tokens=5, ignore_eos=True)
            assert [len(ids_of(chunks)) for chunks in again] == [5, 5, 5]
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_r4_abort_ends_every_stream_and_a_live_id_is_refused_whatever_its_count() -> None:
    async def test() -> None:
        engine = scripted_engine(max_len=4096, delay_s=0.002)
        async with serving(engine) as (server, client):
            for first, second in ((3, 1), (3, 2), (1, 3)):
                live = asyncio.create_task(streams(client, "a", request_id="same", n=first, **ENDLESS))
                await until(lambda count=first: engine.running == count)
                with pytest.raises(CallFailed) as caught:
                    await streams(client, "b", request_id="same", n=second)
                assert caught.value.code is grpc.StatusCode.ALREADY_EXISTS
                assert "'same'" in caught.value.details
                assert await client.abort("same")
                assert [chunks[-1].finish for chunks in await live] == [FinishReason.ABORTED] * first
                assert not await client.abort("same")
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_r4_a_client_that_leaves_frees_every_slot() -> None:
    async def test() -> None:
        engine = scripted_engine(max_len=4096, delay_s=0.002)
        async with serving(engine) as (server, client):
            async for _ in client.generate("a", n=3, **ENDLESS):
                break
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_r4_one_failing_stream_ends_the_call_and_aborts_the_others() -> None:
    async def test() -> None:
        engine = scripted_engine(max_len=4096, delay_s=0.002)
        async with serving(engine) as (server, _):
            request = Request("g", encoded("a"), 4000, ignore_eos=True)

            async def read() -> None:
                async with fan_out(server.host, request, 3) as parcels:
                    async for _ in parcels:
                        server.host.outbox._mailboxes["g#1"].fail(InvalidRequest("broken", 1, "by the test"))

            with pytest.raises(InvalidRequest, match="broken"):
                await read()
            assert not server.host.abort("g")
            server.host.abort("g#1")  # the engine does not know that the test ended it
            await until(lambda: engine.running == engine.waiting == 0)
            assert not engine.has_work

    run(test)


UNICODE_PROMPTS = ["plain", "naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦 🇩🇪", "mixed 漢 é 🚀\n\ttab", "\x00 nul"]


@pytest.mark.parametrize("prompt", UNICODE_PROMPTS)
def test_r5_streamed_text_equals_a_solo_run_and_never_splits_a_character(prompt: str) -> None:
    ids = encoded(prompt)
    expected_ids, expected_text, finish = solo(Request("solo", ids, 100))

    async def test() -> None:
        async with serving(scripted_engine()) as (_, client):
            answer = await client.complete(prompt, max_tokens=100)
            assert (answer.token_ids, answer.text, answer.finish) == (expected_ids, expected_text, finish)
            assert answer.text == byte_tokenizer().decode(answer.token_ids)
            by_ids = await client.complete(list(ids), max_tokens=100)
            assert (by_ids.token_ids, by_ids.text) == (answer.token_ids, answer.text)

    run(test)


class StalledContext:
    """A call whose first message is stuck in the transport until `gate` opens."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.messages: list[Any] = []

    async def write(self, message: Any) -> None:
        self.messages.append(message)
        await self.gate.wait()

    def time_remaining(self) -> None:
        return None


def test_r8_a_slow_reader_gets_merged_messages_and_holds_nobody_up() -> None:
    expected, text, _ = solo(Request("solo", encoded("slow"), 1000, ignore_eos=True), max_len=1024)

    async def test() -> None:
        async with serving(scripted_engine(max_len=1024)) as (server, client):
            request = build_request("slow", request_id="slow", max_tokens=1000, ignore_eos=True)
            context = StalledContext()
            slow = asyncio.create_task(DcutServicer(server.host).Generate(request, context))
            await until(lambda: len(server.host.outbox) == 1)
            mailbox = server.host.outbox._mailboxes["slow"]
            for _ in range(5):
                answer = await client.complete("quick", max_tokens=20, ignore_eos=True)
                assert len(answer.token_ids) == 20
            await until(lambda: mailbox.final, timeout_s=20)
            assert len(mailbox) == outbox.PENDING_PARCELS
            assert len(context.messages) == 1
            context.gate.set()
            await slow
        messages = context.messages
        assert len(messages) == 1 + outbox.PENDING_PARCELS
        assert [message.steps for message in messages[:-1]] == [1] * outbox.PENDING_PARCELS
        assert sum(message.steps for message in messages) == messages[-1].usage.steps
        assert tuple(token for message in messages for token in message.token_ids) == expected
        assert "".join(message.text for message in messages) == text

    run(test)
