"""The HTTP port for Prometheus and for probes: /metrics, /healthz, /readyz."""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from dcut_server.host import EngineHost, ServerState
from dcut_server.lifecycle import DcutServer
from dcut_server.ops.gauges import ServerGauges
from dcut_server.ops.metrics import RequestMetrics, StepMetrics
from dcut_trt.errors import DcutError

_TEXT = ("Content-Type", "text/plain; charset=utf-8")


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True  # a scrape that hangs must not hold the end of the process

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without WSGIServer's look-up of the host's name, which may hang
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _SixServer(_Server):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


def serve_metrics(host: str, port: int) -> Callable[[DcutServer], AbstractAsyncContextManager[str]]:
    """The sidecar that counts what a server does and answers Prometheus; port 0 takes a free one."""

    @asynccontextmanager
    async def sidecar(server: DcutServer) -> AsyncIterator[str]:
        registry = CollectorRegistry()
        requests = RequestMetrics(registry)
        steps = StepMetrics(registry, server.host.identity.draft_length)
        registry.register(ServerGauges(server.host))
        server.host.observers.append(requests)
        server.host.step_listeners.append(steps.observe)
        http = _listen(host, port, http_app(registry, server.host))
        thread = threading.Thread(target=http.serve_forever, name="dcut-metrics", daemon=True)
        thread.start()
        try:
            name = f"[{host}]" if ":" in host else host
            yield f"metrics at http://{name}:{http.server_port}/metrics"
        finally:
            await asyncio.to_thread(http.shutdown)
            http.server_close()

    return sidecar


def http_app(registry: CollectorRegistry, host: EngineHost) -> Callable[..., Iterable[bytes]]:
    """A WSGI application. /healthz tells whether the process should live on, /readyz whether it takes requests."""
    metrics: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        state = host.state
        match environ["PATH_INFO"]:
            case "/metrics":
                return metrics(environ, start_response)
            case "/healthz":
                good = state is not ServerState.FAILED
            case "/readyz":
                good = state is ServerState.SERVING
            case _:
                start_response("404 Not Found", [_TEXT])
                return [b"/metrics, /healthz and /readyz are served here\n"]
        start_response("200 OK" if good else "503 Service Unavailable", [_TEXT])
        return [f"{state.value}\n".encode()]

    return app


def _listen(host: str, port: int, app: Callable[..., Iterable[bytes]]) -> WSGIServer:
    """Raises DcutError when nobody can listen there."""
    try:
        return make_server(host, port, app, _SixServer if ":" in host else _Server, _SilentHandler)
    except OSError as error:
        raise DcutError(f"metrics_port={port}: cannot listen on {host}:{port}: {error.strerror}") from error
