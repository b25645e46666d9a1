"""The page's HTTP server: static files, two JSON documents, and a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import platform
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import Any

from aiohttp import web

from dcut_server.dashboard.feed import Feed
from dcut_server.lifecycle import DcutServer
from dcut_trt.errors import DcutError, EngineUnavailable

WRITE_LIMIT_S = 20.0
"""A viewer that has read nothing for so long is let go."""

CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def dashboard(server: DcutServer, host: str, port: int) -> AsyncIterator[str]:
    """Serve the page of a server at host:port, 0 takes a free one. Raises DcutError when the port is taken."""
    feed = Feed(server.host, server.address)
    runner = web.AppRunner(_app(feed, host), handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise DcutError(f"dashboard: cannot listen on {host}:{port}: {error.strerror}") from error
        name = f"[{host}]" if ":" in host else host
        yield f"dashboard on http://{name}:{runner.addresses[0][1]}/"
    finally:
        await feed.close()
        await runner.cleanup()


def _app(feed: Feed, host: str) -> web.Application:
    async def snapshot(_request: web.Request) -> web.Response:
        return web.json_response(feed.snapshot())

    async def cost_table(_request: web.Request) -> web.Response:
        return web.json_response(feed.cost_table())

    async def events(request: web.Request) -> web.StreamResponse:
        return await _events(request, feed)

    app = web.Application(middlewares=[_guard(host)])
    app.router.add_get("/api/snapshot", snapshot)
    app.router.add_get("/api/cost-table", cost_table)
    app.router.add_get("/api/events", events, allow_head=False)
    for name, body, content_type in _static_files():
        path = "/" if name == "index.html" else f"/{name}"
        app.router.add_get(path, _file_handler(body, content_type))
    return app


def _static_files() -> list[tuple[str, bytes, str]]:
    """Name, bytes and type of every file of the page. They are few and small, so they are held."""
    folder = files("dcut_server.dashboard") / "static"
    return [
        (entry.name, entry.read_bytes(), CONTENT_TYPES[entry.name[entry.name.rindex(".") :]])
        for entry in folder.iterdir()
    ]


def _file_handler(body: bytes, content_type: str) -> Handler:
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    return handle


async def _events(request: web.Request, feed: Feed) -> web.StreamResponse:
    """One event per frame, until the viewer leaves or the server ends."""
    frames = feed.frames()
    try:
        frame = await anext(frames)
    except EngineUnavailable as error:
        return web.Response(status=503, text=f"{error}\n")
    except StopAsyncIteration:
        return web.Response(status=503, text="the server is shutting down\n")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **HEADERS})
    async with contextlib.aclosing(frames):
        # A reset connection is a viewer who left, a timeout one who does not read.
        with contextlib.suppress(ConnectionError, TimeoutError):
            await response.prepare(request)
            while True:
                await asyncio.wait_for(response.write(b"data: " + frame + b"\n\n"), WRITE_LIMIT_S)
                frame = await anext(frames, b"")
                if not frame:
                    break
    return response


def _guard(host: str) -> Any:
    """Refuses other Host headers than ours, and adds HEADERS to every answer."""
    own_names = {"localhost", host.lower(), platform.node().lower()}

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        # A foreign page may point its own name at this address (DNS rebinding); an address or our name it cannot claim.
        if not _is_ours(request.headers.get("Host", ""), own_names):
            response: web.StreamResponse = web.Response(status=403, text="unknown Host header\n")
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                error.headers.update(HEADERS)
                raise
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    return guard


def _is_ours(host_header: str, own_names: set[str]) -> bool:
    name = host_header.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name in own_names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
