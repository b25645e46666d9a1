"""One event loop in one thread that relays many requests at once to a dcut-trt server."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc
from dcut_wire import is_last, tensors_from_messages

from dcut_server.generated.dcut.v1 import dcut_pb2, dcut_pb2_grpc

SWEEP_S = 0.01  # how often live requests are asked whether their client has left
SWEEP_SHARE = 0.2  # of the loop's time at most: each question is a round trip to another process
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # A restarted server is found again within a second; gRPC's own limit is two minutes.
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_log = logging.getLogger(__name__)


class Reply(Protocol):
    """Where the answer of one request goes. Exactly one of finish and fail is called, once."""

    def is_cancelled(self) -> bool:
        """Whether the client has left."""

    def send(self, tensors: dict[str, Any]) -> None:
        """One response of several."""

    def finish(self, tensors: dict[str, Any], usage: dcut_pb2.Usage) -> None:
        """The final response."""

    def fail(self, code: grpc.StatusCode, message: str) -> None:
        """The final response of a request that has no more output."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request. streaming: one response per engine step instead of one for all.  timeout_s: None for no limit."""

    request: dcut_pb2.GenerateRequest
    streaming: bool
    timeout_s: float | None
    reply: Reply


class Relay:
    """`submit` from any thread. `close` ends what is live, and must be called."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._live: dict[asyncio.Task[None], Job] = {}
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._stub: Any = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), name="dcut-relay")
        self._thread.start()
        self._started.wait()

    def submit(self, job: Job) -> None:
        self._loop.call_soon_threadsafe(self._start, job)

    def close(self) -> None:
        """Every live request fails with UNAVAILABLE before this returns."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        self._loop.close()

    async def _run(self) -> None:
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            self._stub = dcut_pb2_grpc.DcutServiceStub(channel)
            self._started.set()
            sweeping = asyncio.create_task(self._sweep())
            await self._closing.wait()
            sweeping.cancel()
            live = list(self._live)
            for task in live:
                task.cancel()
            await asyncio.gather(*live)

    def _start(self, job: Job) -> None:
        task = self._loop.create_task(self._relay(job))
        self._live[task] = job

    async def _sweep(self) -> None:
        """Cancel the calls of clients that have left, wherever they are: queued, or between two tokens."""
        while True:
            began = time.monotonic()
            for task, job in list(self._live.items()):
                if job.reply.is_cancelled():
                    task.cancel()
            spent = time.monotonic() - began
            await asyncio.sleep(max(SWEEP_S, spent * (1 / SWEEP_SHARE - 1)))

    async def _relay(self, job: Job) -> None:
        call = self._stub.Generate(job.request, timeout=job.timeout_s)
        try:
            await _pump(call, job)
        except asyncio.CancelledError:
            if self._closing.is_set():
                job.reply.fail(grpc.StatusCode.UNAVAILABLE, "the model is being unloaded")
            else:
                job.reply.fail(grpc.StatusCode.CANCELLED, "the client cancelled the request")
        except grpc.aio.AioRpcError as error:
            job.reply.fail(error.code(), self._told(error))
        except Exception:
            _log.exception("a request could not be relayed")
            job.reply.fail(grpc.StatusCode.INTERNAL, "the answer could not be relayed; Triton's log has the details")
        finally:
            # At once: Triton crashes when it is asked about a request that has had its final response.
            self._live.pop(cast("asyncio.Task[None]", asyncio.current_task()))
            call.cancel()

    def _told(self, error: grpc.aio.AioRpcError) -> str:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return f"dcut-trt server at {self.address}: {error.details()}"
        return error.details() or error.code().name


async def _pump(call: Any, job: Job) -> None:
    """Messages to responses: each by itself when streaming, else all in one."""
    messages: list[dcut_pb2.GenerateResponse] = []
    async for message in call:
        messages.append(message)
        if is_last(message):
            job.reply.finish(tensors_from_messages(messages), message.usage)
            return
        if job.streaming:
            job.reply.send(tensors_from_messages(messages))
            messages.clear()
    job.reply.fail(grpc.StatusCode.INTERNAL, "the dcut-trt server ended the stream without its final message")
