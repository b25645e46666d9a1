"""What `serve` can run beside the gRPC server: a context manager over it, which yields a line for the operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from dcut_server.dashboard.sidecar import dashboard_sidecar
from dcut_server.gateway import openai_gateway
from dcut_server.lifecycle import DcutServer
from dcut_server.ops.metrics_server import serve_metrics
from dcut_server.ops.tracing import trace_requests
from dcut_server.serve_options import ServeOptions

Sidecar = Callable[[DcutServer], AbstractAsyncContextManager[str]]


def watching_sidecars(options: ServeOptions) -> list[Sidecar]:
    """Those that only look at the server, and so answer while its engine still loads."""
    sidecars: list[Sidecar] = []
    if options.dashboard_port is not None:
        sidecars.append(dashboard_sidecar(options))
    if options.metrics_port is not None:
        sidecars.append(serve_metrics(options.host, options.metrics_port))
    if options.otlp_endpoint is not None:
        sidecars.append(trace_requests(options.otlp_endpoint, options.trace_sample_rate))
    return sidecars


def calling_sidecars(options: ServeOptions) -> list[Sidecar]:
    """Those that call the server, and so start when it serves."""
    return [] if options.openai_port is None else [openai_gateway(options)]
