"""The gRPC server around the engine: bind, load, serve, drain, with the health service telling the truth throughout."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import trtllm_service_pb2_grpc

from dcut_server import trtllm_service
from dcut_server.dcut_service import SERVICE_NAME, DcutServicer
from dcut_server.generated.dcut.v1 import dcut_pb2_grpc
from dcut_server.host import EngineHost, Identity, ServerState
from dcut_server.ops.transport import Transport
from dcut_trt.engine import Engine
from dcut_trt.errors import DcutError, EngineUnavailable
from dcut_trt.loop import EngineLoop, LoopState
from dcut_trt.types import Request, StepEvent

FLUSH_S = 1.0
"""Time for the last messages and statuses to leave after the streams have ended."""

_log = logging.getLogger(__name__)

Opener = Callable[[Callable[[ServerState], object]], Engine]
"""Loads and profiles an engine, in a thread; its argument takes the state that this has reached."""


def warm_up(engine: Engine) -> None:
    """Run one short request through the whole engine. Raises what fails."""
    length = min(engine.limits.draft_length + 2, engine.limits.max_len - 1)
    engine.submit(Request("warm-up", (0,), length, ignore_eos=True))
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise event.error
    engine.trace.reset()


def _why_not(host: str, port: int) -> str | None:
    """The system's reason why nobody can listen there, which gRPC only logs."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        return error.strerror
    return None


class DcutServer:
    """One server over one engine: bind(), open(), then shut_down(). Used by `serve` and by tests alike."""

    def __init__(self, identity: Identity, transport: Transport | None = None) -> None:
        self.host = EngineHost(identity)
        self.address = ""
        self._asyncio = asyncio.get_running_loop()
        self._transport = transport or Transport()
        self._server = self._transport.new_server()
        self._health = cast(Any, health).aio.HealthServicer()
        dcut_pb2_grpc.add_DcutServiceServicer_to_server(DcutServicer(self.host), self._server)
        trtllm_service_pb2_grpc.add_TrtllmServiceServicer_to_server(
            trtllm_service.TrtllmServicer(self.host), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        services = (SERVICE_NAME, trtllm_service.SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, self._server)

    async def bind(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Answer calls at host:port, NOT_SERVING yet; port 0 takes a free one. Raises DcutError when it is taken."""
        name = f"[{host}]" if ":" in host else host
        try:
            bound = self._transport.listen(self._server, f"{name}:{port}")
        except RuntimeError as error:
            raise DcutError(f"cannot listen on {name}:{port}: {_why_not(host, port) or error}") from error
        self.address = f"{name}:{bound}"
        await self._set_health(serving=False)
        await self._server.start()

    async def open(self, opener: Opener) -> None:
        """Load and warm the engine and start to serve. Raises what fails in that; the state is FAILED then."""
        try:
            engine = await asyncio.to_thread(self._load, opener)
        except Exception:
            self.host.state = ServerState.FAILED
            raise
        engine.trace.listeners.extend(self.host.step_listeners)
        loop = EngineLoop(engine, self._publish, self._hear_loop_state)
        loop.start()
        self.host.attach(engine, loop)
        await self._set_health(serving=True)

    async def shut_down(self, grace_s: float, hurry: asyncio.Event) -> bool:
        """Refuse new calls and let live streams finish; those left after grace_s, or at hurry, end with UNAVAILABLE.

        True when none was left.
        """
        if self.host.state is not ServerState.FAILED:
            self._set_state(ServerState.DRAINING)
        await self._health.enter_graceful_shutdown()
        finished = await self._wait_for_streams(grace_s, hurry)
        if not finished:
            self.host.outbox.fail_all(EngineUnavailable("the server is shutting down and had to abort this request"))
        await self._server.stop(FLUSH_S)
        await asyncio.to_thread(self._close_engine)
        return finished

    def _publish(self, events: Sequence[StepEvent]) -> None:
        """Called from the engine's thread."""
        self.host.outbox.publish(events)
        if self.host.observers:
            self._asyncio.call_soon_threadsafe(self._tell_observers, tuple(events))

    def _tell_observers(self, events: Sequence[StepEvent]) -> None:
        for observer in self.host.observers:
            observer.published(events)

    def _load(self, opener: Opener) -> Engine:
        """Called from a thread."""
        engine = opener(lambda state: self._asyncio.call_soon_threadsafe(self._set_state, state))
        warm_up(engine)
        return engine

    async def _wait_for_streams(self, grace_s: float, hurry: asyncio.Event) -> bool:
        empty = asyncio.create_task(self.host.outbox.wait_empty())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({empty, hurried}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        finished = empty.done()
        empty.cancel()
        hurried.cancel()
        return finished

    def _close_engine(self) -> None:
        if self.host.loop is not None:
            self.host.loop.close()
        if self.host.engine is not None:
            self.host.engine.close()

    def _set_state(self, state: ServerState) -> None:
        self.host.state = state

    def _hear_loop_state(self, state: LoopState) -> None:
        """Called from the engine's thread."""
        if state is LoopState.FAILED:
            self._asyncio.call_soon_threadsafe(self._on_dead_engine)

    def _on_dead_engine(self) -> None:
        """Nobody may wait for an engine that stopped by itself."""
        _log.critical("the engine failed; this server must be restarted")
        self._set_state(ServerState.FAILED)
        self.host.outbox.fail_all(EngineUnavailable("the engine failed; the server's log has the details"))
        self._failing = asyncio.create_task(self._set_health(serving=False))

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in ("", SERVICE_NAME, trtllm_service.SERVICE_NAME):
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)
