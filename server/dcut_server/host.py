"""The engine as the services see it: what state it is in, and one stream per request."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dcut_server.outbox import Mailbox, Outbox
from dcut_trt.engine import Engine
from dcut_trt.errors import EngineUnavailable
from dcut_trt.loop import EngineLoop
from dcut_trt.manifest import Manifest
from dcut_trt.types import Request


class ServerState(enum.Enum):
    LOADING = "loading"
    PROFILING = "profiling"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Identity:
    """What is served, known before any engine is loaded. policy: its name.  max_queue: requests that may wait."""

    target: str
    target_sha256: str
    drafter: str
    drafter_sha256: str
    backend: str
    precision: str
    draft_length: int
    ratios: tuple[float, ...]
    policy: str
    max_batch: int
    max_len: int
    max_queue: int
    vocab_size: int

    @classmethod
    def of(cls, manifest: Manifest, policy: str, max_queue: int) -> Identity:
        return cls(
            target=manifest.target.identity,
            target_sha256=manifest.target.sha256,
            drafter=manifest.drafter.identity,
            drafter_sha256=manifest.drafter.sha256,
            backend=manifest.backend,
            precision=manifest.precision,
            draft_length=manifest.draft_length,
            ratios=manifest.ratios,
            policy=policy,
            max_batch=manifest.max_batch,
            max_len=manifest.max_len,
            max_queue=max_queue,
            vocab_size=manifest.target.vocab_size,
        )


class EngineHost:
    """Holds the engine, its loop and the outbox. Belongs to the event loop's thread."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.state = ServerState.LOADING
        self.outbox = Outbox(asyncio.get_running_loop())
        self._engine: Engine | None = None
        self._loop: EngineLoop | None = None

    def attach(self, engine: Engine, loop: EngineLoop) -> None:
        """Serve this engine, whose loop runs and publishes to the outbox."""
        self._engine, self._loop = engine, loop
        self.state = ServerState.SERVING

    @property
    def engine(self) -> Engine | None:
        """None until it is loaded."""
        return self._engine

    @property
    def loop(self) -> EngineLoop | None:
        """None until the engine is loaded."""
        return self._loop

    def require_engine(self) -> Engine:
        """The loaded engine. Raises EngineUnavailable before that."""
        if self._engine is None:
            raise EngineUnavailable(f"the server is {self.state.value}; no engine is loaded")
        return self._engine

    def require_serving(self) -> EngineLoop:
        """The loop that takes requests. Raises EngineUnavailable in every state but SERVING."""
        if self._loop is None or self.state is not ServerState.SERVING:
            raise EngineUnavailable(f"the server is {self.state.value}; it takes no new requests")
        return self._loop

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[Mailbox]:
        """Submit a request and read its parcels; leaving the block early aborts it.

        Raises InvalidRequest, QueueFull, DuplicateRequest, EngineUnavailable.
        """
        loop = self.require_serving()
        mailbox = await self.outbox.open(request.request_id)
        try:
            loop.submit(request)
        except BaseException:
            self.outbox.discard(mailbox)
            raise
        try:
            yield mailbox
        finally:
            if self.outbox.release(mailbox):
                loop.abort(request.request_id)
