"""Who is told about requests and steps, without standing between the stages that run them."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import grpc

from dcut_trt.metrics import StepRecord
from dcut_trt.types import Commit, Request, StepEvent

StepListener: TypeAlias = Callable[[StepRecord, Sequence[Commit]], None]
"""Called in the engine's thread after every step; quick, and does not raise."""


class RequestObserver(Protocol):
    """Called in the event loop's thread; for every request that runs, submitted() comes before published()."""

    def refused(self, error: Exception) -> None:
        """A call for tokens ended before the engine had taken it, or all of its streams."""

    def submitted(self, request: Request) -> None:
        """The engine has taken this request. Called in the context of the call that brought it."""

    def published(self, events: Sequence[StepEvent]) -> None:
        """One step's events; every submitted request has one final event."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """What is known about the gRPC call that is being served. metadata: the text ones that the caller sent."""

    metadata: Mapping[str, str] = field(default_factory=dict)


_NO_CALL = CallContext()
CALL: contextvars.ContextVar[CallContext] = contextvars.ContextVar("dcut_call", default=_NO_CALL)
REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("dcut_request_id", default="")


class CallContextInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Notes each call's metadata; the call's handler runs in the same task and so sees it."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        texts = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}
        CALL.set(CallContext(texts))
        return await continuation(details)
