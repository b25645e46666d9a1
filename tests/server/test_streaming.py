"""Generate over a real server: messages, text, usage, concurrency, slow readers."""

from __future__ import annotations

import asyncio

from live_server import encoded, nothing_left, run, serving, solo, until

from dcut_server.client import complete
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.types import FinishReason, Request, SamplingParams


def test_one_message_per_engine_step() -> None:
    async def test() -> None:
        engine = scripted_engine(delay_s=0.005)
        async with serving(engine) as (_, client):
            chunks = [chunk async for chunk in client.generate("Hello", max_tokens=60, ignore_eos=True)]
        assert [chunk.steps for chunk in chunks] == [1] * len(chunks)
        assert {chunk.request_id for chunk in chunks} == {chunks[0].request_id}
        assert chunks[0].request_id
        assert all(chunk.token_ids for chunk in chunks)
        assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        last = chunks[-1]
        assert last.finish is FinishReason.LENGTH
        assert last.usage is not None
        assert last.usage.steps == len(chunks)
        assert last.usage.prompt_tokens == len("Hello")
        assert last.usage.output_tokens == sum(len(chunk.token_ids) for chunk in chunks) == 60
        assert last.usage.accepted <= last.usage.verified <= last.usage.drafted
        assert len(chunks) < 60, "drafts were accepted"

    run(test)


def test_chat_is_rendered_with_the_models_template() -> None:
    prompt = "system: Be brief.\nuser: Hi\nassistant: "
    expected, _, _ = solo(Request("solo", encoded(prompt), 20))

    async def test() -> None:
        async with serving(scripted_engine()) as (_, client):
            turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
            answer = await client.complete(turns, max_tokens=20)
            assert answer.token_ids == expected

    run(test)


def test_max_tokens_defaults_to_the_context_limit() -> None:
    async def test() -> None:
        async with serving(scripted_engine(max_len=64)) as (_, client):
            answer = await client.complete("1234", ignore_eos=True)
            assert answer.usage.prompt_tokens + answer.usage.output_tokens == 64
            assert answer.finish is FinishReason.LENGTH

    run(test)


def test_32_concurrent_streams_equal_their_solo_runs() -> None:
    requests = [
        Request(
            f"request-{index}",
            encoded(f"prompt number {index} " * (1 + index % 4)),
            40 + index,
            SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=index) if index % 3 == 0 else SamplingParams(),
            stop=("a", "zz") if index % 5 == 0 else (),
        )
        for index in range(32)
    ]

    async def test() -> None:
        engine = scripted_engine(max_batch=8)
        async with serving(engine) as (server, client):

            async def ask(request: Request) -> tuple[tuple[int, ...], str, FinishReason]:
                sampling = request.sampling
                options = {} if sampling.greedy else {"top_k": sampling.top_k, "top_p": sampling.top_p}
                seed = {} if sampling.seed is None else {"seed": sampling.seed}
                answer = await client.complete(
                    list(request.prompt_ids),
                    request_id=request.request_id,
                    max_tokens=request.max_tokens,
                    temperature=sampling.temperature,
                    stop=request.stop,
                    **options,
                    **seed,
                )
                assert answer.request_id == request.request_id
                return answer.token_ids, answer.text, answer.finish

            answers = await asyncio.gather(*(ask(request) for request in requests))
            await until(lambda: nothing_left(server, engine))
            totals = (await client.info()).totals
        assert totals.requests_finished == 32
        assert totals.output_tokens == sum(len(ids) for ids, _, _ in answers)
        for request, answer in zip(requests, answers, strict=True):
            assert answer == solo(request), request.request_id

    run(test)


def test_streams_without_a_seed_differ() -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (_, client):
            answers = [await client.complete("same", max_tokens=30, temperature=1.0) for _ in range(3)]
            assert len({answer.token_ids for answer in answers}) == 3
            seeded = [await client.complete("same", max_tokens=30, temperature=1.0, seed=7) for _ in range(2)]
            assert seeded[0].token_ids == seeded[1].token_ids

    run(test)


def test_the_sync_helper() -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (server, _):
            answer = await asyncio.to_thread(complete, server.address, "Hello", max_tokens=5, ignore_eos=True)
            assert len(answer.token_ids) == 5

    run(test)
