"""A real server over the scripted model, in this process, on a loopback port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from dcut_server.cli_generate import generate
from dcut_server.client import DcutClient
from dcut_server.host import Identity
from dcut_server.lifecycle import DcutServer
from dcut_trt.backends.scripted import byte_tokenizer, scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.types import FinishReason, Request


def identity_of(engine: Engine) -> Identity:
    limits = engine.limits
    return Identity(
        target="scripted target",
        target_sha256="ab" * 32,
        drafter="scripted drafter",
        drafter_sha256="cd" * 32,
        backend="scripted",
        precision="fp32",
        draft_length=limits.draft_length,
        ratios=(0.25, 0.5, 0.75, 1.0),
        policy=engine.policy.name,
        max_batch=limits.max_batch,
        max_len=limits.max_len,
        max_queue=engine.scheduler.max_queue,
        vocab_size=limits.vocab_size,
    )


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[tuple[DcutServer, DcutClient]]:
    """A serving server and a client of it; afterwards nothing of any request may be left."""
    server = DcutServer(identity_of(engine))
    await server.bind()
    await server.open(lambda _report: engine)
    try:
        async with DcutClient(server.address) as client:
            yield server, client
    finally:
        await server.shut_down(0.0, asyncio.Event())


def run(test: Callable[[], Awaitable[Any]]) -> None:
    """Run an async test with a limit on its time."""

    async def limited() -> None:
        await asyncio.wait_for(test(), timeout=40)

    asyncio.run(limited())


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for a condition on the server's side; fails when it does not come."""
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true in time"
        await asyncio.sleep(0.002)


def nothing_left(server: DcutServer, engine: Engine) -> bool:
    """Every slot, block and map entry of every request is back."""
    return (
        len(server.host.outbox) == 0
        and not engine.has_work
        and engine.running == engine.waiting == 0
        and engine.free_blocks == engine.scheduler.pool.num_blocks
        and not engine.scheduler.live_ids()
    )


def solo(request: Request, **options: Any) -> tuple[tuple[int, ...], str, FinishReason]:
    """What a request gives alone, on a plain engine in this thread: ids, text, finish reason."""
    events = list(generate(scripted_engine("plain", **options), request))
    finish = events[-1].finish
    assert finish is not None
    return (
        tuple(token for event in events for token in event.tokens),
        "".join(event.text for event in events),
        finish,
    )


def encoded(text: str) -> tuple[int, ...]:
    """Ids of a text under the scripted model's tokenizer."""
    return tuple(byte_tokenizer().encode(text))
