"""The ways to reach the server, each as a sender of one request, and a closed loop of readers over any of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from dcut_server.bench.datasets import Prompt
from dcut_server.bench.runner import Pass
from dcut_server.client import DcutClient
from dcut_trt.errors import DcutError

if TYPE_CHECKING:
    import aiohttp

START_TIMEOUT_S = 60.0
POLL_S = 0.2

Sender = Callable[[Prompt], AsyncIterator[None]]
"""Sends one prompt and yields at every message that brings output. Raises what went wrong, or PathFailed."""


class PathFailed(DcutError):
    """A server on the way answered with an error, or with fewer tokens than it was asked for."""


@dataclass(frozen=True, slots=True)
class PathPass:
    """One closed loop over one path. first_ms, whole_ms: of each request, until its first and its last message."""

    path: str
    concurrency: int
    round: int
    wall_s: float
    output_tokens: int
    first_ms: tuple[float, ...]
    whole_ms: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.wall_s


def grpc_sender(client: DcutClient, max_tokens: int) -> Sender:
    """dcut.v1 over gRPC."""

    async def send(prompt: Prompt) -> AsyncIterator[None]:
        messages = [{"role": "user", "content": prompt.text}]
        tokens = 0
        async for chunk in client.generate(messages, max_tokens=max_tokens, ignore_eos=True):
            tokens += len(chunk.token_ids)
            yield
        _check_total("grpc", tokens, max_tokens)

    return send


def openai_sender(session: aiohttp.ClientSession, base_url: str, model: str, max_tokens: int) -> Sender:
    """OpenAI's chat completions; base_url ends in /v1."""

    async def send(prompt: Prompt) -> AsyncIterator[None]:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens = 0
        async for event in _events(session, f"{base_url}/chat/completions", body):
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            yield
        _check_total("openai", tokens, max_tokens)

    return send


def triton_sender(
    session: aiohttp.ClientSession, base_url: str, render: Callable[[str], str], max_tokens: int
) -> Sender:
    """Triton's generate_stream of the model `dcut`. render: the chat template, which Triton leaves to its caller."""

    async def send(prompt: Prompt) -> AsyncIterator[None]:
        body = {
            "text_input": render(prompt.text),
            "streaming": True,
            "sampling_param_max_tokens": max_tokens,
            "sampling_param_temperature": 0.0,
            "sampling_param_ignore_eos": True,
        }
        async for _ in _events(session, f"{base_url}/v2/models/dcut/generate_stream", body):
            yield

    return send


async def closed_loop(
    path: str, send: Sender, prompts: Sequence[Prompt], concurrency: int, max_tokens: int, round_number: int = 0
) -> PathPass:
    """Send all prompts with at most `concurrency` live. Raises the first error of a request when all have ended."""
    clock = time.perf_counter
    waiting = deque(prompts)
    first_ms: list[float] = []
    whole_ms: list[float] = []

    async def reader() -> None:
        while waiting:
            prompt, begun = waiting.popleft(), clock()
            first: float | None = None
            async for _ in send(prompt):
                first = first or clock()
            first_ms.append(((first or clock()) - begun) * 1e3)
            whole_ms.append((clock() - begun) * 1e3)

    started = clock()
    try:
        async with asyncio.TaskGroup() as readers:
            for _ in range(concurrency):
                readers.create_task(reader())
    except* Exception as group:
        raise group.exceptions[0] from None
    tokens = len(prompts) * max_tokens
    return PathPass(path, concurrency, round_number, clock() - started, tokens, tuple(first_ms), tuple(whole_ms))


def of_engine(served: Pass, max_tokens: int) -> PathPass:
    """A pass of the engine alone, as a path."""
    for stream in served.streams:
        _check_total(served.policy, len(stream.tokens), max_tokens)
    first = tuple((stream.arrivals[0][0] - stream.submitted) * 1e3 for stream in served.streams)
    whole = tuple((stream.arrivals[-1][0] - stream.submitted) * 1e3 for stream in served.streams)
    return PathPass(served.policy, served.concurrency, served.round, served.wall_s, served.output_tokens, first, whole)


async def wait_for_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The id of the gateway's model, once it answers a request. Raises PathFailed after START_TIMEOUT_S."""
    last = ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                try:
                    async with session.get(f"{base_url}/models") as response:
                        model = str(json.loads(await response.text())["data"][0]["id"])
                    # A gateway lists a model before it has its tokenizer: only an answer tells that it is ready.
                    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
                    async with session.post(f"{base_url}/chat/completions", json=body) as response:
                        last = await response.text()
                        if response.status != HTTPStatus.SERVICE_UNAVAILABLE:
                            return model
                except (OSError, ValueError, LookupError) as error:
                    last = str(error)
                await asyncio.sleep(POLL_S)
    raise PathFailed(f"{base_url}: no answer after {START_TIMEOUT_S:g} s: {last}")


def _check_total(path: str, tokens: int, wanted: int) -> None:
    if tokens != wanted:
        raise PathFailed(f"{path}: a request made {tokens} tokens instead of {wanted}; the paths cannot be compared")


async def _events(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of every server-sent event of one answer."""
    async with session.post(url, json=body) as response:
        if response.status != HTTPStatus.OK:
            raise PathFailed(f"{url}: {response.status}: {await response.text()}")
        async for line in response.content:
            data = line.decode().removeprefix("data:").strip()
            if line.startswith(b"data:") and data != "[DONE]":
                event = json.loads(data)
                if "error" in event:
                    raise PathFailed(f"{url}: {event['error']}")
                yield event
