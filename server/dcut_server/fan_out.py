"""One call for n streams of the same prompt: n engine requests, one iterator over all of their parcels."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from dcut_server.host import EngineHost
from dcut_server.outbox import Mailbox, Parcel
from dcut_trt.errors import InvalidRequest
from dcut_trt.types import Request

SEED_LIMIT = 2**63


def expand(request: Request, count: int) -> tuple[Request, ...]:
    """The engine's requests for `count` streams. Stream i samples with seed + i, as a single request would.

    Raises InvalidRequest when the last of those seeds has no place in 63 bits.
    """
    if count == 1:
        return (request,)
    seed = request.sampling.seed
    if seed is not None and seed + count > SEED_LIMIT:
        raise InvalidRequest("sampling.seed", seed, f"must be at most 2**63 - {count} for {count} streams")
    return tuple(
        dataclasses.replace(
            request,
            request_id=f"{request.request_id}#{index}",
            sampling=dataclasses.replace(request.sampling, seed=None if seed is None else seed + index),
        )
        for index in range(count)
    )


@asynccontextmanager
async def fan_out(host: EngineHost, request: Request, count: int) -> AsyncIterator[AsyncIterator[tuple[int, Parcel]]]:
    """Submit `count` streams of one request and read (index, parcel) of all; leaving the block early aborts them.

    When one of them is not admitted, none is. When one fails, the block raises its error and the others are aborted.
    Raises what EngineHost.stream does.
    """
    requests = expand(request, count)
    async with AsyncExitStack() as stack:
        if count > 1:
            stack.enter_context(host.group(request.request_id, tuple(part.request_id for part in requests)))
        mailboxes = [await stack.enter_async_context(host.stream(part)) for part in requests]
        yield await stack.enter_async_context(aclosing(merge(mailboxes)))


async def merge(mailboxes: Sequence[Mailbox]) -> AsyncGenerator[tuple[int, Parcel], None]:
    """Parcels of all streams in the order in which they come. Raises the first stream's error.

    One pending read per stream: a slow reader has the mailboxes merge, as for a single stream.
    """
    if len(mailboxes) == 1:
        async for only in mailboxes[0]:
            yield 0, only
        return
    reads = {asyncio.create_task(_next(mailbox)): index for index, mailbox in enumerate(mailboxes)}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in sorted(done, key=reads.__getitem__):
                parcel = await read
                index = reads.pop(read)
                if parcel is not None:
                    reads[asyncio.create_task(_next(mailboxes[index]))] = index
                    yield index, parcel
    finally:
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)


async def _next(mailbox: Mailbox) -> Parcel | None:
    return await anext(mailbox, None)
