"""The servicer of dcut.v1.DcutService."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any, TypeVar

import grpc

from dcut_server import convert
from dcut_server.fan_out import fan_out
from dcut_server.generated.dcut.v1 import dcut_pb2
from dcut_server.host import EngineHost
from dcut_server.status import status_of

SERVICE_NAME: str = dcut_pb2.DESCRIPTOR.services_by_name["DcutService"].full_name

Reply = TypeVar("Reply")
Method = Callable[[Any, Any, Any], Awaitable[Reply]]


def with_status(method: Method[Reply]) -> Method[Reply]:
    """Turns what a method raises into a gRPC status."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Any) -> Reply:
        try:
            return await method(self, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            code, details = status_of(error)
            await context.abort(code, details)
            raise AssertionError("context.abort always raises") from error

    return call


def deadline_of(context: Any) -> float | None:
    """The call's deadline in seconds on the monotonic clock; None when the client set none."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


class DcutServicer:
    """Thin: converts, streams, and reports. Cancelling a call cancels its coroutine, which aborts the request."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    @with_status
    async def Generate(self, message: Any, context: Any) -> None:  # noqa: N802 - the name is the contract's
        async with AsyncExitStack() as stack:
            with self._host.admission():
                self._host.require_serving()
                engine = self._host.require_engine()
                count = convert.streams_from_proto(message)
                # Off the event loop: a long prompt takes long enough to tokenize for other streams to notice.
                request = await asyncio.to_thread(
                    convert.request_from_proto, message, engine.tokenizer, engine.limits.max_len, deadline_of(context)
                )
                parcels = await stack.enter_async_context(fan_out(self._host, request, count))
            async for index, parcel in parcels:
                await context.write(convert.parcel_to_proto(request.request_id, parcel, index))

    @with_status
    async def GetInfo(self, _message: Any, _context: Any) -> Any:  # noqa: N802
        identity = self._host.identity
        info = dcut_pb2.GetInfoResponse(
            version=version("dcut-trt"),
            state=f"SERVER_STATE_{self._host.state.name}",
            target=dcut_pb2.Model(identity=identity.target, sha256=identity.target_sha256),
            drafter=dcut_pb2.Model(identity=identity.drafter, sha256=identity.drafter_sha256),
            backend=identity.backend,
            precision=identity.precision,
            draft_length=identity.draft_length,
            ratios=identity.ratios,
            policy=identity.policy,
            limits=dcut_pb2.Limits(
                max_batch=identity.max_batch,
                max_len=identity.max_len,
                max_queue=identity.max_queue,
                vocab_size=identity.vocab_size,
            ),
        )
        self._add_live_numbers(info)
        return info

    @with_status
    async def GetCostTable(self, _message: Any, _context: Any) -> Any:  # noqa: N802
        return convert.cost_table_to_proto(self._host.require_engine().cost_table)

    @with_status
    async def Abort(self, message: Any, _context: Any) -> Any:  # noqa: N802
        return dcut_pb2.AbortResponse(found=self._host.abort(message.request_id))

    def _add_live_numbers(self, info: Any) -> None:
        engine = self._host.engine
        if engine is None:
            return
        info.gauges.running = engine.running
        info.gauges.waiting = engine.waiting
        info.gauges.free_kv_blocks = engine.free_blocks
        totals = engine.trace.totals
        for field in info.totals.DESCRIPTOR.fields:  # named as ours are
            setattr(info.totals, field.name, getattr(totals, field.name))
