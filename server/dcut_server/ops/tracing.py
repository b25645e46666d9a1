"""OpenTelemetry spans of every request: its queueing, prefill and decoding, and for a share of them every step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dcut_server.host import Identity
from dcut_server.lifecycle import DcutServer
from dcut_server.ops.observers import CALL
from dcut_server.status import status_of
from dcut_trt.errors import UnsupportedOption
from dcut_trt.types import FinishReason, Request, RequestTimes, StepEvent, Usage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

OPERATION = "text_completion"
EXPORT_TIMEOUT_S = 5.0

_NO_USAGE = Usage(0, 0, 0, 0, 0, 0)


@dataclass(slots=True)
class _Live:
    """One request's span. detailed: whether its steps are shown.  usage: after its latest step."""

    span: Span
    submitted_ns: int
    detailed: bool
    usage: Usage = field(default=_NO_USAGE)


class RequestTracer:
    """Observes requests (ops/observers.py). Spans join the trace that the caller's `traceparent` metadata names."""

    def __init__(self, tracer: Tracer, identity: Identity, sample_rate: float) -> None:
        from opentelemetry.sdk.trace.sampling import TraceIdRatioBased  # noqa: PLC0415 - an optional dependency
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._tracer = tracer
        self._identity = identity
        # By trace id, so that all requests of one trace show their steps, or none.
        self._bound = TraceIdRatioBased.get_bound_for_rate(sample_rate)
        self._propagator = TraceContextTextMapPropagator()
        self._live: dict[str, _Live] = {}

    def refused(self, error: Exception) -> None:
        """No request has run, so there is no span."""

    def submitted(self, request: Request) -> None:
        from opentelemetry.trace import SpanKind  # noqa: PLC0415

        parent = self._propagator.extract(CALL.get().metadata)
        now = time.time_ns()
        span = self._tracer.start_span(
            f"{OPERATION} {self._identity.target}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=_request_attributes(request, self._identity.target),
            start_time=now,
        )
        detailed = span.get_span_context().trace_id & ((1 << 64) - 1) < self._bound
        self._live[request.request_id] = _Live(span, now, detailed)

    def published(self, events: Sequence[StepEvent]) -> None:
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue
            if live.detailed and event.tokens:
                live.span.add_event("step", _step_attributes(live.usage, event.usage))
                live.usage = event.usage
            if event.final:
                self._end(self._live.pop(event.request_id), event)

    def _end(self, live: _Live, event: StepEvent) -> None:
        from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415

        live.span.set_attributes(_result_attributes(event))
        if event.error is not None:
            code, details = status_of(event.error)
            live.span.set_attribute("error.type", code.name)
            live.span.set_status(Status(StatusCode.ERROR, details))
        if event.times is not None:
            self._add_phases(live, event.times)
        live.span.end(time.time_ns())

    def _add_phases(self, live: _Live, times: RequestTimes) -> None:
        """Child spans. The engine's clock and the trace's meet at the submission."""
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        context = set_span_in_context(live.span)
        moments = [times.submitted, times.admitted, times.first_token, times.finished]
        for name, begun, ended in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
            if begun is None:
                return
            last = ended is None
            end = times.finished if ended is None else ended
            if end is None:
                return
            span = self._tracer.start_span(name, context, start_time=_moment(live, times, begun))
            span.end(_moment(live, times, end))
            if last:  # the request ended in this phase
                return


def trace_requests(endpoint: str, sample_rate: float) -> Callable[[DcutServer], AbstractAsyncContextManager[str]]:
    """The sidecar that sends spans to an OTLP collector over gRPC.

    Raises UnsupportedOption when the endpoint is no URL or the tracing extra is not installed.
    """
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
        raise UnsupportedOption(f"otlp_endpoint={endpoint!r}: must be http://HOST:PORT, or https:// for TLS")

    @asynccontextmanager
    async def sidecar(server: DcutServer) -> AsyncIterator[str]:
        provider = _provider(endpoint)
        tracer = provider.get_tracer("dcut_server", version("dcut-trt"))
        server.host.observers.append(RequestTracer(tracer, server.host.identity, sample_rate))
        try:
            yield f"traces go to {endpoint}"
        finally:
            await asyncio.to_thread(provider.shutdown)

    return sidecar


def _provider(endpoint: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise UnsupportedOption(
            f"otlp_endpoint={endpoint!r}: needs OpenTelemetry: pip install 'dcut-trt[tracing]'"
        ) from error
    resource = Resource.create({"service.name": "dcut-trt", "service.version": version("dcut-trt")})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    secure = urlsplit(endpoint).scheme == "https"
    exporter = OTLPSpanExporter(endpoint, insecure=not secure, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _moment(live: _Live, times: RequestTimes, seconds: float) -> int:
    return live.submitted_ns + round((seconds - times.submitted) * 1e9)


def _request_attributes(request: Request, model: str) -> dict[str, Any]:
    """Names of the semantic conventions for generative AI; never the prompt."""
    sampling = request.sampling
    return {
        "gen_ai.operation.name": OPERATION,
        "gen_ai.provider.name": "dcut-trt",
        "gen_ai.request.model": model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
    }


def _result_attributes(event: StepEvent) -> dict[str, Any]:
    usage, finish = event.usage, event.finish
    reasons = [finish.value] if finish is not None and finish is not FinishReason.ABORTED else ["error"]
    if finish is FinishReason.ABORTED:
        reasons = ["aborted"]
    return {
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "dcut.steps": usage.steps,
        "dcut.draft_tokens.proposed": usage.drafted,
        "dcut.draft_tokens.verified": usage.verified,
        "dcut.draft_tokens.accepted": usage.accepted,
    }


def _step_attributes(before: Usage, after: Usage) -> dict[str, Any]:
    return {
        "tokens": after.output_tokens - before.output_tokens,
        "drafted": after.drafted - before.drafted,
        "verified": after.verified - before.verified,
        "accepted": after.accepted - before.accepted,
    }
