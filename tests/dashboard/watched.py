"""A server over the scripted model with its dashboard, and a real browser that looks at it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np
from live_server import serving
from playwright.async_api import Page, async_playwright

from dcut_server.client import Completion, DcutClient
from dcut_server.lifecycle import DcutServer
from dcut_server.serve_options import ServeOptions
from dcut_server.sidecars import watching_sidecars
from dcut_trt.engine import Engine
from dcut_trt.metrics import StepRecord
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.stage_types import Rows, Verified
from dcut_trt.types import Commit

CHROMIUM_FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@asynccontextmanager
async def watched(server: DcutServer, port: int = 0) -> AsyncIterator[str]:
    """The dashboard of a server, made as `serve` makes it; yields its address."""
    (sidecar,) = watching_sidecars(ServeOptions(dashboard_port=port))
    async with sidecar(server) as line:
        assert line.startswith("dashboard on http://127.0.0.1:"), line
        yield line.removeprefix("dashboard on ")


@asynccontextmanager
async def serving_watched(engine: Engine, port: int = 0) -> AsyncIterator[tuple[DcutServer, DcutClient, str]]:
    """port: of the dashboard."""
    async with serving(engine) as (server, client), watched(server, port) as url:
        yield server, client, url


@asynccontextmanager
async def browsing(url: str, *, width: int = 1280, height: int = 800, scheme: str = "light") -> AsyncIterator[Page]:
    """The page in Chromium. Nothing may go to the console, and no request to another host than 127.0.0.1."""
    chromium = shutil.which("chromium")
    assert chromium, "chromium is not on PATH: bash tests/dashboard/setup.sh"
    complaints: list[str] = []
    hosts: set[str | None] = set()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS.split())
        page = await browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.set_default_timeout(15_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
        await page.goto(url)
        try:
            yield page
        finally:
            await browser.close()
    assert hosts == {"127.0.0.1"}
    # A server that is gone is meant to be noticed, and the browser itself writes that down.
    unexpected = [text for text in complaints if "ERR_CONNECTION" not in text and "ERR_INCOMPLETE" not in text]
    assert not unexpected, unexpected


async def shows(page: Page, element: str, text: str) -> None:
    """Wait until an element's text is this; the timeout's error says what it was."""
    try:
        await page.wait_for_function(
            "([id, text]) => document.getElementById(id).textContent === text", arg=[element, text]
        )
    except Exception as error:
        seen = await page.text_content(f"#{element}")
        raise AssertionError(f"#{element} shows {seen!r}, expected {text!r}") from error


class Gate:
    """Stops the engine between two steps for as long as a test looks at the page."""

    def __init__(self, engine: Engine) -> None:
        self._open, self._blocked = threading.Event(), threading.Event()
        self._open.set()
        self._forward = engine.target.forward
        engine.target.forward = self._wait_and_forward

    def _wait_and_forward(self, rows: Rows, *heads: np.ndarray) -> Verified:
        if not self._open.is_set():
            self._blocked.set()
            assert self._open.wait(30), "the gate stayed shut"
        return self._forward(rows, *heads)

    async def close(self) -> None:
        """Returns when the engine stands still, in a step that has not counted yet; there must be live requests."""
        self._blocked.clear()
        self._open.clear()
        assert await asyncio.to_thread(self._blocked.wait, 30), "nothing ran"

    def open(self) -> None:
        self._open.set()


@dataclass
class Witness:
    """Hears the engine's steps as the dashboard does. steps: (accepted, verified) of every request's decode steps."""

    steps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)

    def __call__(self, record: StepRecord, commits: Sequence[Commit]) -> None:
        for commit in commits:
            self.tokens[commit.request_id] += len(commit.tokens)
            if record.kind == "decode":
                self.steps.setdefault(commit.request_id, []).append((commit.accepted, commit.verified))


def cost_table(state: str = "measured") -> CostTable:
    return CostTable(
        batches=(1, 4, 8),
        ratios=(0.25, 0.5, 0.75, 1.0),
        cost_ms=np.array([[7.18, 7.1625, 7.31, 7.353], [9.5, 10.4, 12.8, 16.5], [29.9, 43.0, 56.6, 133.9]]),
        plain_ms=np.array([5.0, 5.5, 8.25]),
        fingerprint="a machine",
        measured_at="2026-11-30T03:16:04+00:00",
        state=state,
    )


@asynccontextmanager
async def streaming(client: DcutClient, count: int, max_tokens: int) -> AsyncIterator[list[asyncio.Task[Completion]]]:
    """`count` live streams, named stream-0 and so on; those that still run at the end are cancelled."""
    streams = [
        asyncio.create_task(
            client.complete(f"prompt {index}", request_id=f"stream-{index}", max_tokens=max_tokens, ignore_eos=True)
        )
        for index in range(count)
    ]
    try:
        yield streams
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
