"""Closed loops over a path, and the table that compares paths."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from live_server import serving

from dcut_server.bench.datasets import Prompt
from dcut_server.bench.paths import PathFailed, PathPass, closed_loop, grpc_sender, openai_sender, wait_for_model
from dcut_server.bench.paths_cli import path_rows
from dcut_trt.backends.scripted import scripted_engine

PROMPTS = [Prompt(str(index), f"prompt {index}") for index in range(6)]


def test_every_prompt_is_sent_with_no_more_live_than_asked_for() -> None:
    live, most, sent = 0, 0, []

    async def send(prompt: Prompt) -> AsyncIterator[None]:
        nonlocal live, most
        live, most = live + 1, max(most, live + 1)
        sent.append(prompt.id)
        await asyncio.sleep(0)
        yield
        live -= 1

    served = asyncio.run(closed_loop("x", send, PROMPTS, 2, 5))
    assert sorted(sent) == sorted(prompt.id for prompt in PROMPTS)
    assert most == 2
    assert served.output_tokens == 30
    assert len(served.first_ms) == len(served.whole_ms) == 6


def test_a_request_that_fails_fails_the_pass_with_its_own_error() -> None:
    async def send(prompt: Prompt) -> AsyncIterator[None]:
        if prompt.id == "3":
            raise PathFailed("prompt 3")
        yield

    with pytest.raises(PathFailed, match="prompt 3"):
        asyncio.run(closed_loop("x", send, PROMPTS, 2, 5))


def test_the_grpc_path_reaches_a_server_and_counts_what_it_sent() -> None:
    async def run() -> PathPass:
        async with serving(scripted_engine(max_len=256)) as (_, client):
            return await closed_loop("grpc", grpc_sender(client, 12), PROMPTS, 3, 12)

    assert asyncio.run(run()).output_tokens == 72


def test_an_http_error_names_address_and_answer() -> None:
    aiohttp = pytest.importorskip("aiohttp")
    from aiohttp import web  # noqa: PLC0415

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": "ignore_eos: not here"}, status=400)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", refuse)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            async with aiohttp.ClientSession() as session:
                assert await wait_for_model(session, base_url) == "m"
                await closed_loop("openai", openai_sender(session, base_url, "m", 5), PROMPTS, 1, 5)
        finally:
            await runner.cleanup()

    with pytest.raises(PathFailed, match=r"chat/completions: 400: .*ignore_eos"):
        asyncio.run(run())


def test_ratios_are_taken_within_a_round_and_latencies_over_all_requests() -> None:
    def one(path: str, round_number: int, wall_s: float, first: float) -> PathPass:
        return PathPass(path, 4, round_number, wall_s, 100, (first, first), (first * 2, first * 2))

    rows = path_rows(
        [one("engine", 0, 1.0, 10), one("grpc", 0, 1.25, 12), one("engine", 1, 2.0, 10), one("grpc", 1, 2.0, 14)]
    )
    engine, grpc = rows
    assert engine["of_engine"] == 1.0
    assert grpc["of_engine"] == pytest.approx(0.9)  # the median of 0.8 and 1.0
    assert grpc["first_added_ms"] == pytest.approx(3.0)
    assert grpc["whole_added_ms"] == pytest.approx(6.0)
