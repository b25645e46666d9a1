"""The engine as the services see it: what state it is in, and one stream per request."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from dcut_server.ops.observers import RequestObserver, StepListener
from dcut_server.outbox import Mailbox, Outbox
from dcut_trt.engine import Engine
from dcut_trt.errors import DuplicateRequest, EngineUnavailable
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
    """What is served, known before any engine is loaded. policy: its name.  max_queue: requests that may wait.

    hidden_size, layers, heads: of the target; 0 where unknown.
    """

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
    hidden_size: int = 0
    layers: int = 0
    heads: int = 0

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
            hidden_size=manifest.target.hidden_size,
            layers=manifest.target.layers,
            heads=manifest.target.heads,
        )


class EngineHost:
    """Holds the engine, its loop and the outbox. Belongs to the event loop's thread.

    observers are told about requests, step_listeners about steps once the engine serves; add them before that.
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.state = ServerState.LOADING
        self.outbox = Outbox(asyncio.get_running_loop())
        self.observers: list[RequestObserver] = []
        self.step_listeners: list[StepListener] = []
        self._engine: Engine | None = None
        self._loop: EngineLoop | None = None
        self._groups: dict[str, tuple[str, ...]] = {}

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

    @contextmanager
    def admission(self) -> Iterator[None]:
        """Around all that a call for tokens goes through before it runs: observers are told when it is turned away."""
        try:
            yield
        except Exception as error:
            for observer in self.observers:
                observer.refused(error)
            raise

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[Mailbox]:
        """Submit a request and read its parcels; leaving the block early aborts it.

        Raises InvalidRequest, QueueFull, DuplicateRequest, EngineUnavailable.
        """
        loop = self.require_serving()
        self._refuse_group(request.request_id)
        mailbox = await self.outbox.open(request.request_id)
        try:
            loop.submit(request)
        except BaseException:
            self.outbox.discard(mailbox)
            raise
        try:
            for observer in self.observers:  # before any event of this request: those come through the event loop
                observer.submitted(request)
            yield mailbox
        finally:
            if self.outbox.release(mailbox):
                loop.abort(request.request_id)

    @contextmanager
    def group(self, request_id: str, members: tuple[str, ...]) -> Iterator[None]:
        """Meanwhile this id stands for the engine requests `members`. Raises DuplicateRequest while it is live."""
        self._refuse_group(request_id)
        if self.outbox.is_read(request_id):
            raise DuplicateRequest(f"request_id={request_id!r} is live already")
        self._groups[request_id] = members
        try:
            yield
        finally:
            del self._groups[request_id]

    def abort(self, request_id: str) -> bool:
        """End a live request, or all streams of a group. False when the id names none."""
        if self._loop is None:
            return False
        members = self._groups.get(request_id, (request_id,))
        found = [self._loop.abort(member) for member in members]
        return any(found)

    def _refuse_group(self, request_id: str) -> None:
        if request_id in self._groups:
            raise DuplicateRequest(f"request_id={request_id!r} is live already")
