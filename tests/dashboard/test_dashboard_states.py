"""The page through a server's life: it says what the server does, and comes back by itself when the server does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

from live_server import identity_of, run
from playwright.async_api import Page
from watched import Gate, browsing, serving_watched, shows, streaming, watched

from dcut_server.client import DcutClient
from dcut_server.host import ServerState
from dcut_server.lifecycle import DcutServer
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.engine import Engine


async def banner(page: Page) -> str:
    return await page.inner_text("#banner") if await page.is_visible("#banner") else ""


def test_page_follows_a_server_from_loading_to_draining_and_into_the_next_one() -> None:
    engine = scripted_engine(max_len=1024, delay_s=0.005)
    profile, ready = threading.Event(), threading.Event()

    def opener(report: Callable[[ServerState], Any]) -> Engine:
        profile.wait(30)
        report(ServerState.PROFILING)
        ready.wait(30)
        return engine

    async def scenario() -> None:
        async with AsyncExitStack() as dashboards:
            server = DcutServer(identity_of(engine))
            await server.bind()
            url = await dashboards.enter_async_context(watched(server))
            opening = asyncio.create_task(server.open(opener))
            async with browsing(url) as page:
                await shows(page, "state", "loading")
                assert "turns live by itself" in await banner(page)
                await shows(page, "empty_title", "Not serving yet.")
                profile.set()
                await shows(page, "state", "profiling")
                assert "Measuring" in await banner(page)
                ready.set()
                await opening
                await shows(page, "state", "serving")
                assert await banner(page) == ""
                await shows(page, "empty_command", f'dcut-trt client --address {server.address} "Why is the sky blue?"')
                assert await page.is_visible("#empty_command")

                await drain_with_a_live_stream(server, engine, page)
                await dashboards.aclose()
                await shows(page, "state", "disconnected")
                assert "does not answer" in await banner(page)

                async with serving_watched(scripted_engine(), urlsplit(url).port or 0):
                    await shows(page, "state", "serving")
                    assert await banner(page) == ""

    run(scenario)


async def drain_with_a_live_stream(server: DcutServer, engine: Engine, page: Page) -> None:
    async with DcutClient(server.address) as client:
        gate = Gate(engine)
        async with streaming(client, 1, 300) as (stream,):
            await page.wait_for_selector(".strip")
            await gate.close()
            closing = asyncio.create_task(server.shut_down(30.0, asyncio.Event()))
            await shows(page, "state", "draining")
            assert "new requests are refused" in await banner(page)
            gate.open()
            assert (await stream).usage.output_tokens == 300
            await closing


def test_page_says_that_the_engine_failed() -> None:
    async def scenario() -> None:
        engine = scripted_engine(max_len=1024, delay_s=0.005)
        async with (
            serving_watched(engine) as (_, client, url),
            browsing(url) as page,
            streaming(client, 1, 900) as (stream,),
        ):
            await page.wait_for_selector(".strip")
            engine.scheduler.schedule = lambda now: 1 / 0
            await shows(page, "state", "failed")
            assert "must be restarted" in await banner(page)
            assert isinstance((await asyncio.gather(stream, return_exceptions=True))[0], Exception)

    run(scenario)
