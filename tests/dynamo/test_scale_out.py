"""Through Dynamo's frontend: the same text as from a server itself, also when a worker or a server dies on the way."""

from __future__ import annotations

import asyncio
import re
import signal
import urllib.request

import openai
import pytest
from cluster import MAX_BATCH, MAX_QUEUE, Cluster, model_listed

from dcut_server.client import DcutClient

QUESTIONS = [
    f"{question} Explain in detail."
    for question in (
        "Why is the sky blue?",
        "How do plants grow?",
        "What is a prime number?",
        "How does a bicycle stay upright?",
        "Why do cats purr?",
        "What makes bread rise?",
        "How do boats float?",
        "Why is ice slippery?",
    )
]
MAX_TOKENS = 96
CAPACITY = 2 * (MAX_BATCH + MAX_QUEUE)


@pytest.fixture(scope="session")
def answers(loop_runner: asyncio.Runner, two_workers: Cluster) -> list[str]:
    """What a server answers to each question alone, asked directly."""

    async def ask(address: str, questions: list[str]) -> list[str]:
        async with DcutClient(address) as client:
            chats = [[{"role": "user", "content": question}] for question in questions]
            return [(await client.complete(chat, max_tokens=MAX_TOKENS)).text for chat in chats]

    async def ask_all() -> list[str]:
        halves = QUESTIONS[:4], QUESTIONS[4:]
        first, second = await asyncio.gather(*(map(ask, two_workers.addresses, halves)))
        return first + second

    return loop_runner.run(ask_all())


class Stream:
    """One chat through the frontend. begun: set at its first text."""

    def __init__(self, client: openai.AsyncOpenAI, model: str, question: str) -> None:
        self.begun = asyncio.Event()
        self.text, self.finish = "", ""
        self.task = asyncio.create_task(self._read(client, model, question))

    async def _read(self, client: openai.AsyncOpenAI, model: str, question: str) -> None:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
        )
        async for chunk in stream:
            for choice in chunk.choices:
                self.text += choice.delta.content or ""
                self.finish = choice.finish_reason or self.finish
                if self.text:
                    self.begun.set()


async def open_streams(client: openai.AsyncOpenAI, model: str) -> list[Stream]:
    """All questions at once, each in the middle of its answer."""
    streams = [Stream(client, model, question) for question in QUESTIONS]
    await asyncio.gather(*(stream.begun.wait() for stream in streams))
    return streams


async def texts(streams: list[Stream]) -> list[str]:
    await asyncio.gather(*(stream.task for stream in streams))
    assert all(stream.finish in ("stop", "length") for stream in streams)
    return [stream.text for stream in streams]


async def running(here: Cluster) -> list[int]:
    """Requests in the batch or queue of every server."""
    counts = []
    for address in here.addresses:
        async with DcutClient(address) as client:
            gauges = (await client.info()).gauges
            counts.append(gauges.running + gauges.waiting)
    return counts


async def all_idle(here: Cluster) -> None:
    async with asyncio.timeout(10):
        while any(await running(here)):
            await asyncio.sleep(0.02)


async def moved(here: Cluster) -> float:
    """How many requests the frontend has moved to another worker so far."""

    def metrics() -> str:
        with urllib.request.urlopen(f"{here.url}/metrics") as reply:
            return reply.read().decode()

    text = await asyncio.to_thread(metrics)
    return sum(float(value) for value in re.findall(r"^dynamo_frontend_model_migration_total\{.*\} (\S+)", text, re.M))


def test_chat_and_completions_equal_the_server_itself(
    loop_runner: asyncio.Runner, two_workers: Cluster, answers: list[str]
) -> None:
    async def run() -> None:
        model = await model_listed(two_workers)
        async with two_workers.client() as client, DcutClient(two_workers.addresses[0]) as direct:
            chat = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": QUESTIONS[0]}],
                max_tokens=MAX_TOKENS,
                temperature=0,
            )
            assert chat.choices[0].message.content == answers[0]
            prompt = "Once upon a time"
            expected = await direct.complete(prompt, max_tokens=24)
            stream = await client.completions.create(
                model=model, prompt=prompt, max_tokens=24, temperature=0, stream=True
            )
            text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
            assert text == expected.text
            sampled = [
                await client.completions.create(
                    model=model, prompt=prompt, max_tokens=16, temperature=0.9, top_p=0.9, seed=11
                )
                for _ in range(2)  # one on each worker
            ]
            expected = await direct.complete(prompt, max_tokens=16, temperature=0.9, top_p=0.9, seed=11)
            assert [answer.choices[0].text for answer in sampled] == [expected.text] * 2
            assert sampled[0].usage is not None
            assert sampled[0].usage.prompt_tokens == expected.usage.prompt_tokens
            assert sampled[0].usage.completion_tokens == expected.usage.output_tokens

    loop_runner.run(run())


def test_logprobs_are_those_of_the_tokens(loop_runner: asyncio.Runner, two_workers: Cluster) -> None:
    async def run() -> None:
        model = await model_listed(two_workers)
        async with two_workers.client() as client:
            chat = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=8,
                temperature=0,
                logprobs=True,
                top_logprobs=2,
            )
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert chat.usage is not None
        assert len(logprobs.content) == chat.usage.completion_tokens
        for token in logprobs.content:  # greedy: the token is the most probable one
            assert token.logprob == token.top_logprobs[0].logprob <= 0
            assert token.top_logprobs[1].logprob <= token.logprob

    loop_runner.run(run())


def test_stop_strings_cut_the_text_and_free_the_slot(
    loop_runner: asyncio.Runner, two_workers: Cluster, answers: list[str]
) -> None:
    word = answers[1].split()[3]

    async def run() -> None:
        model = await model_listed(two_workers)
        async with two_workers.client() as client:
            chat = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": QUESTIONS[1]}],
                max_tokens=1500,
                temperature=0,
                stop=[word],
            )
            assert chat.choices[0].message.content == answers[1][: answers[1].index(word)]
            assert chat.choices[0].finish_reason == "stop"
        await all_idle(two_workers)

    loop_runner.run(run())


def test_requests_spread_over_both_workers(
    loop_runner: asyncio.Runner, two_workers: Cluster, answers: list[str]
) -> None:
    async def run() -> None:
        model = await model_listed(two_workers)
        async with two_workers.client() as client:
            streams = await open_streams(client, model)
            assert all(await running(two_workers))
            assert await texts(streams) == answers

    loop_runner.run(run())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1}, "emperature"),
        ({"n": 2}, "n=2"),
        ({"response_format": {"type": "json_object"}}, "guided_decoding"),
        ({"messages": [{"role": "user", "content": "long " * 3000}]}, "prompt"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_a_bad_request_is_refused_by_name(
    loop_runner: asyncio.Runner, two_workers: Cluster, fields: dict[str, object], named: str
) -> None:
    async def run() -> None:
        model = await model_listed(two_workers)
        async with two_workers.client() as client:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4} | fields
            with pytest.raises(openai.BadRequestError, match=named):
                await client.chat.completions.create(model=model, messages=[], extra_body=body)

    loop_runner.run(run())


def test_a_client_that_leaves_frees_its_slot(loop_runner: asyncio.Runner, two_workers: Cluster) -> None:
    async def run() -> None:
        model = await model_listed(two_workers)
        async with two_workers.client() as client:
            stream = await client.completions.create(
                model=model, prompt="One, two,", max_tokens=1900, temperature=0, stream=True
            )
            async for _ in stream:
                break
            assert any(await running(two_workers))
            await stream.close()
        await all_idle(two_workers)

    loop_runner.run(run())


def test_a_full_queue_sends_requests_elsewhere_and_then_away(loop_runner: asyncio.Runner, two_workers: Cluster) -> None:
    async def run() -> None:
        model = await model_listed(two_workers)
        async with two_workers.client() as client:

            async def code(number: int) -> int:
                try:
                    await client.completions.create(
                        model=model, prompt=f"Story {number}:", max_tokens=32, temperature=0
                    )
                except openai.APIStatusError as error:
                    return error.status_code
                return 200

            codes = await asyncio.gather(*map(code, range(3 * CAPACITY)))
            assert set(codes) == {200, 503}
            assert codes.count(200) >= CAPACITY
            assert await code(0) == 200

    loop_runner.run(run())


def test_a_worker_drains_at_sigterm(loop_runner: asyncio.Runner, two_workers: Cluster, answers: list[str]) -> None:
    async def run() -> None:
        model = await model_listed(two_workers)
        async with two_workers.client() as client:
            streams = await open_streams(client, model)
            assert all(await running(two_workers))
            leaving = asyncio.create_task(two_workers.workers[0].end(signal.SIGTERM))
            assert await texts(streams) == answers
            assert await leaving == 0
            after = Stream(client, model, QUESTIONS[2])
            assert await texts([after]) == [answers[2]]
        await two_workers.replace_worker(0)

    loop_runner.run(run())


def test_streams_of_a_killed_worker_go_on_at_the_other(
    loop_runner: asyncio.Runner, two_workers: Cluster, answers: list[str]
) -> None:
    async def run() -> None:
        model = await model_listed(two_workers)
        async with two_workers.client() as client:
            streams = await open_streams(client, model)
            assert all(await running(two_workers))
            before = await moved(two_workers)
            await two_workers.workers[0].end(signal.SIGKILL)
            assert await texts(streams) == answers
            assert await moved(two_workers) > before
        await all_idle(two_workers)
        await two_workers.replace_worker(0)

    loop_runner.run(run())


def test_streams_of_a_killed_server_go_on_at_the_other_and_its_worker_leaves(
    loop_runner: asyncio.Runner, two_workers: Cluster, answers: list[str]
) -> None:
    async def run() -> None:
        model = await model_listed(two_workers)
        async with two_workers.client() as client:
            streams = await open_streams(client, model)
            before = await moved(two_workers)
            await two_workers.servers[1].end(signal.SIGKILL)
            assert await texts(streams) == answers
            assert await moved(two_workers) > before
            await two_workers.workers[1].process.wait()  # it leaves by itself
            after = [Stream(client, model, QUESTIONS[3]) for _ in range(2)]
            assert await texts(after) == [answers[3]] * 2

    loop_runner.run(run())
