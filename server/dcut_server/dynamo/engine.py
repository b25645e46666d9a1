"""Dynamo's engine interface over one dcut-trt server. Runs where `ai-dynamo` is installed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NoReturn, Self

import grpc
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.llm import exceptions
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dcut_server.dynamo.model_card import default_card_dir, write_model_card
from dcut_server.dynamo.wire import chunk_from_proto, request_to_proto
from dcut_server.dynamo.worker_options import WorkerOptions, parse_worker_options
from dcut_server.generated.dcut.v1 import dcut_pb2, dcut_pb2_grpc
from dcut_server.ops.channel import open_channel, with_token
from dcut_trt.errors import DcutError
from dcut_trt.manifest import Manifest

_log = logging.getLogger(__name__)
START_TIMEOUT_S = 300.0  # a first start of the server profiles the machine
CHANNEL = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 2000))
_LOST = dict.fromkeys(  # gRPC has all three for a connection that broke
    (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN), exceptions.Disconnected
)
_NOT_BEGUN = dict.fromkeys((*_LOST, grpc.StatusCode.RESOURCE_EXHAUSTED), exceptions.CannotConnect) | {
    grpc.StatusCode.INVALID_ARGUMENT: exceptions.InvalidArgument
}
SERVING = health_pb2.HealthCheckResponse.SERVING


class DcutEngine(LLMEngine):  # type: ignore[misc]  # its base has no types here
    """One worker. It leaves (SIGTERM to itself) when its server drains or dies, so Dynamo forgets it."""

    def __init__(self, options: WorkerOptions, manifest: Manifest, card: str) -> None:
        self._options, self._manifest, self._card = options, manifest, card
        self._channel = open_channel(options.address, CHANNEL, options.tls, options.token)
        self._stub = with_token(dcut_pb2_grpc.DcutServiceStub(self._channel), options.token)
        self._health = with_token(health_pb2_grpc.HealthStub(self._channel), options.token)
        self._calls: dict[str, grpc.aio.UnaryStreamCall[Any, Any]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def from_args(cls, argv: Sequence[str] | None = None) -> tuple[Self, WorkerConfig]:
        options = parse_worker_options(argv)
        card = options.card or default_card_dir(options.bundle)
        manifest = write_model_card(options.bundle, card)
        name = options.served_name or manifest.target.identity
        config = WorkerConfig(
            namespace=options.namespace,
            component=options.component,
            endpoint=options.endpoint,
            model_name=str(card),
            served_model_name=name,
            discovery_backend=options.discovery_backend,
            request_plane=options.request_plane,
            event_plane=options.event_plane,
            enable_kv_routing=False,  # our server announces no KV blocks; Dynamo's router counts requests itself
        )
        return cls(options, manifest, str(card)), config

    async def start(self, worker_id: int) -> EngineConfig:
        """Wait until the server serves. Raises EngineShutdown when it does not, or serves another model."""
        ready = asyncio.Event()
        self._watching = asyncio.create_task(self._leave_with_server(ready))
        _log.info("waiting for the dcut-trt server at %s", self._options.address)
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({waiting, self._watching}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.is_set():
            raise exceptions.EngineShutdown(f"no dcut-trt server serves us at {self._options.address}")
        info = await self._stub.GetInfo(dcut_pb2.GetInfoRequest())
        if info.target.sha256 != self._manifest.target.sha256:
            raise exceptions.EngineShutdown(
                f"{self._options.address} serves {info.target.identity} ({info.target.sha256}); "
                f"{self._options.bundle} holds {self._manifest.target.identity} ({self._manifest.target.sha256})"
            )
        name = self._options.served_name or info.target.identity
        registration = LlmRegistration(context_length=info.limits.max_len, max_num_seqs=info.limits.max_batch)
        return EngineConfig(model=self._card, served_model_name=name, llm=registration)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Stream one request. What it raises tells Dynamo whether the request may go on elsewhere."""
        try:
            message = request_to_proto(request)
        except DcutError as error:
            raise exceptions.InvalidArgument(str(error)) from None
        call = self._stub.Generate(message)
        self._calls[context.id()] = call
        self._idle.clear()
        started = finished = False
        try:
            async for response in call:
                if response.finish_reason == dcut_pb2.FINISH_REASON_ABORTED:
                    break
                started, finished = True, bool(response.finish_reason)
                yield chunk_from_proto(response)
        except grpc.aio.AioRpcError as error:
            _raise_for(error, context, started)
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            if context.is_stopped():
                raise exceptions.Cancelled("by the caller") from None
            raise exceptions.Disconnected("this worker is leaving") from None
        finally:
            call.cancel()
            if self._calls.get(context.id()) is call:  # a moved request keeps its id, and may come back
                del self._calls[context.id()]
            if not self._calls:
                self._idle.set()
        if not finished:
            raise exceptions.StreamIncomplete("the dcut-trt server ended the stream early")

    async def abort(self, context: Any) -> None:
        call = self._calls.get(context.id())
        if call is not None:
            call.cancel()

    async def cleanup(self) -> None:
        """Let live streams finish; Dynamo moves those that are still live after the grace time to another worker."""
        if self._watching is not None:
            self._watching.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.grace_seconds):
                await self._idle.wait()
        await self._channel.close(None)

    async def _leave_with_server(self, ready: asyncio.Event) -> None:
        """Set `ready` once the server serves; from then on, end this process when it no longer does."""
        while not ready.is_set():
            try:
                async for reply in self._health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                    if reply.status == SERVING:
                        ready.set()
                    elif ready.is_set():
                        break
            except grpc.aio.AioRpcError as error:
                _log.warning("%s: %s", self._options.address, error.details())
                if error.code() not in _LOST and not ready.is_set():
                    return  # it refuses us, and would again
        _log.error("the dcut-trt server at %s has stopped serving; this worker leaves", self._options.address)
        os.kill(os.getpid(), signal.SIGTERM)


def _raise_for(error: grpc.aio.AioRpcError, context: Any, started: bool) -> NoReturn:
    """Dynamo tries a request at other workers after CannotConnect (at last 503) and Disconnected; else it fails."""
    code, details = error.code(), error.details() or ""
    if context.is_stopped():
        raise exceptions.Cancelled(details) from None
    raise (_LOST if started else _NOT_BEGUN).get(code, exceptions.Unknown)(details) from None
