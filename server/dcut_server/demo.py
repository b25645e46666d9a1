"""The demo: build, serve, stream to eight clients, and compare with plain decoding. `python -m dcut_server.demo`."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console

from dcut_engines.build_options import BuildOptions
from dcut_engines.bundle import build
from dcut_server.bench.datasets import SHIPPED, Prompt, load_dataset
from dcut_server.bench.options import BenchOptions
from dcut_server.bench.report import NARROWEST, THROUGHPUT_LEGEND, lossless_line, throughput_table
from dcut_server.bench.runner import chat_requests, measure
from dcut_server.bench.summary import Cell, summarise
from dcut_server.cli_inspect import cost_rows_table
from dcut_server.client import DcutClient
from dcut_server.compose import open_engine
from dcut_server.demo_view import Answer, DemoView, Reading, reading_line, usage_sum
from dcut_server.serve_process import serve_process
from dcut_trt.config import EngineOptions
from dcut_trt.errors import DcutError
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.types import Usage

TARGET, DRAFTER, BUNDLE = "smollm2-135m-instruct", "smollm2-135m-dflash-b8", Path("bundles/smollm2-bf16")
CLIENTS, PROMPTS_EACH, MAX_TOKENS, WATCHED = 8, 2, 128, 2
COMPARED = BenchOptions(("plain", "dflash", "dcut"), (CLIENTS,), requests=CLIENTS, rounds=2, max_tokens=64)
TERMINATED = 143


def main() -> int:
    """0, or 1 with the reason on stderr."""
    console = Console()
    if console.width < NARROWEST:
        console = Console(width=NARROWEST)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that the server is stopped on the way out
    try:
        asyncio.run(_serve_and_stream(DemoView(console), _built(console)))
        _compare(console)
    except (DcutError, OSError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _built(console: Console) -> Path:
    begun = time.monotonic()

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        console.print(f"   {name} ...", highlight=False)
        yield

    console.rule(f"build {TARGET} + {DRAFTER}, bf16", align="left")
    bundle = build(BuildOptions(TARGET, DRAFTER, BUNDLE, precision="bf16"), stage)
    console.print(f"   {BUNDLE} is there after {time.monotonic() - begun:.1f} s", highlight=False)
    return bundle


async def _serve_and_stream(view: DemoView, bundle: Path) -> None:
    view.console.rule("serve", align="left")
    begun = time.monotonic()

    def progress(stage: str, done: int, total: int) -> None:
        view.say(f"   {stage} {done}/{total}")

    async with serve_process(bundle, ("--policy", "dcut"), progress) as server:
        view.say(f"   serving on {server.address} after {time.monotonic() - begun:.1f} s")
        async with DcutClient(server.address) as client:
            view.console.print(cost_rows_table(await _cost_table(client)))
            view.console.rule(f"{CLIENTS} clients, {CLIENTS * PROMPTS_EACH} prompts", align="left")
            usages = await _stream_all(view, client)
        view.say(usage_sum(usages))
        code = await server.stop()
        if code != 0:
            raise DcutError(f"the server ended with exit code {code}:\n{server.log_tail}")
        view.say("the server drained and stopped: exit code 0")


async def _cost_table(client: DcutClient) -> CostTable:
    """The server's cost table, over the wire. Raises CostTableError when it has none."""
    reply = await client.cost_table()
    return CostTable(
        batches=tuple(row.batch for row in reply.rows),
        ratios=tuple(reply.ratios),
        cost_ms=np.array([row.cost_ms for row in reply.rows]),
        plain_ms=np.array([row.plain_ms for row in reply.rows]) if all(row.plain_ms for row in reply.rows) else None,
        fingerprint=reply.fingerprint,
        measured_at=reply.measured_at,
        state=reply.state,
    )


async def _stream_all(view: DemoView, client: DcutClient) -> list[Usage]:
    """Eight readers at once, each with its prompts one after the other; the usage of every request."""
    prompts = _prompts(CLIENTS * PROMPTS_EACH)
    with view.streaming():
        watching = asyncio.create_task(_watch(view, client))
        try:
            readers = [_read(view, client, prompts[place::CLIENTS], place) for place in range(CLIENTS)]
            usages = await asyncio.gather(*readers)
        finally:
            watching.cancel()
    return [usage for part in usages for usage in part]


async def _read(view: DemoView, client: DcutClient, prompts: list[Prompt], place: int) -> list[Usage]:
    usages: list[Usage] = []
    for prompt in prompts:
        answer = Answer(prompt.text)
        if place < WATCHED:
            view.watch(place, answer)
        stream = client.generate([{"role": "user", "content": prompt.text}], max_tokens=MAX_TOKENS)
        async for chunk in stream:
            answer.text += chunk.text
            if chunk.usage is not None:
                usages.append(chunk.usage)
    return usages


async def _watch(view: DemoView, client: DcutClient) -> None:
    """Every second, what the server's totals say has happened; runs until cancelled."""
    begun = time.monotonic()
    before = await _reading(client, begun)
    while True:
        await asyncio.sleep(1)
        now = await _reading(client, begun)
        view.tick(reading_line(before, now))
        before = now


async def _reading(client: DcutClient, begun: float) -> Reading:
    info = await client.info()
    totals = info.totals
    return Reading(
        seconds=time.monotonic() - begun,
        running=info.gauges.running,
        steps=totals.steps,
        drafted=totals.drafted,
        verified=totals.verified,
        accepted=totals.accepted,
        output_tokens=totals.output_tokens,
    )


def _prompts(count: int) -> list[Prompt]:
    """Prompts of all shipped datasets, by turns."""
    datasets = [load_dataset(name).prompts for name in SHIPPED]
    return [datasets[index % len(datasets)][index // len(datasets)] for index in range(count)]


def _compare(console: Console) -> None:
    """The same prompts with and without speculation, in turns, in this process."""
    console.rule(f"plain, dflash and dcut in turns, {CLIENTS} requests live", align="left")
    engine = open_engine(BUNDLE, EngineOptions(prefix_cache=False))  # all three run the same prompts
    try:
        requests = chat_requests(_prompts(COMPARED.requests_at(CLIENTS) * COMPARED.rounds), engine.tokenizer, COMPARED)
        cells: list[Cell] = summarise(measure(engine, requests, COMPARED))
    finally:
        engine.close()
    console.print(throughput_table(cells, "the shipped prompts, at most 64 tokens each"))
    console.print(lossless_line(cells, "bf16"), markup=False, highlight=False)
    console.print(THROUGHPUT_LEGEND, style="dim", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
