"""A server over the scripted model with an operator's options, in this process; scrapes of it; and it as a process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from live_server import identity_of
from prometheus_client.parser import text_string_to_metric_families

from dcut_server.lifecycle import DcutServer, Opener
from dcut_server.ops.transport import Transport
from dcut_server.serve_options import ServeOptions
from dcut_server.sidecars import watching_sidecars
from dcut_trt.engine import Engine
from dcut_trt.types import Request, StepEvent

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Operated:
    """A server, the lines that its sidecars gave, and every final event."""

    def __init__(self, server: DcutServer) -> None:
        self.server = server
        self.lines: list[str] = []
        self.finals: list[StepEvent] = []
        server.host.observers.append(self)

    def refused(self, error: Exception) -> None:
        pass

    def submitted(self, request: Request) -> None:
        pass

    def published(self, events: Sequence[StepEvent]) -> None:
        self.finals += [event for event in events if event.final]

    @property
    def http(self) -> str:
        """Base URL of the metrics port."""
        line = next(line for line in self.lines if line.startswith("metrics at "))
        return line.removeprefix("metrics at ").removesuffix("/metrics")

    async def scrape(self) -> Samples:
        return await asyncio.to_thread(scrape, self.http)


@asynccontextmanager
async def operated(engine: Engine, options: ServeOptions, opener: Opener | None = None) -> AsyncIterator[Operated]:
    """It serves inside the block; with an opener of the test's own, the test opens it."""
    async with AsyncExitStack() as sidecars:
        server = DcutServer(identity_of(engine), Transport.of(options))
        running = Operated(server)
        await server.bind(options.host, options.port)
        try:
            for sidecar in watching_sidecars(options):
                running.lines.append(await sidecars.enter_async_context(sidecar(server)))
            if opener is None:
                await server.open(lambda _report: engine)
            yield running
        finally:
            await server.shut_down(0.0, asyncio.Event())


def get(url: str) -> tuple[int, str]:
    """Status and body."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(base: str) -> Samples:
    status, text = get(f"{base}/metrics")
    assert status == 200
    return samples_of(text)


def samples_of(text: str) -> Samples:
    return {
        (sample.name.removeprefix("dcut_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def total(samples: Samples, name: str) -> float:
    """Sum over all labels."""
    return sum(number for (found, _), number in samples.items() if found == name)


@contextmanager
def served(*flags: str, delay_s: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    """`dcut-trt --log-level info serve FLAGS --port 0` as a process, whose bundle is the scripted model."""
    script = Path(__file__).with_name("scripted_cli.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(delay_s), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_lines(process: subprocess.Popen[str], until: Callable[[str], Any]) -> list[str]:
    """Output lines up to the first for which `until` holds."""
    lines: list[str] = []
    assert process.stdout is not None
    while line := process.stdout.readline():
        lines.append(line.rstrip("\n"))
        if until(lines[-1]):
            return lines
    raise AssertionError(f"the server ended: {lines}")
