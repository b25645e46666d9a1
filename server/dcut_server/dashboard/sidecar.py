"""The dashboard as something that `serve` runs beside its gRPC server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from dcut_server.lifecycle import DcutServer
from dcut_server.serve_options import ServeOptions
from dcut_trt.errors import UnsupportedOption


def dashboard_sidecar(options: ServeOptions) -> Callable[[DcutServer], AbstractAsyncContextManager[str]]:
    """Raises UnsupportedOption where aiohttp is not installed."""
    try:
        from dcut_server.dashboard.web import dashboard  # noqa: PLC0415 - aiohttp is optional
    except ModuleNotFoundError as error:
        raise UnsupportedOption(
            f"dashboard_port={options.dashboard_port}: needs aiohttp. Install: pip install 'dcut-trt[dashboard]'"
        ) from error
    port = options.dashboard_port or 0
    return lambda server: dashboard(server, options.host, port)
