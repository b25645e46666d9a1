"""`dcut-trt serve`: one process, one engine, one gRPC server, from start to signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from dcut_server.host import Identity, ServerState
from dcut_server.lifecycle import DcutServer, Opener
from dcut_server.ops.request_log import RequestLog, format_logs
from dcut_server.ops.transport import Transport
from dcut_server.serve_options import ServeOptions
from dcut_server.sidecars import calling_sidecars, watching_sidecars
from dcut_server.stats import print_stats
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.manifest import read_manifest

_log = logging.getLogger(__name__)


def serve(bundle: Path, engine_options: EngineOptions, options: ServeOptions) -> int:
    """Serve a bundle until a signal; the exit code. Raises a DcutError when it cannot start."""
    from dcut_server.compose import open_engine  # noqa: PLC0415 - loads the runtimes

    def opener(report: Callable[[ServerState], object]) -> Engine:
        def progress(stage: str, done: int, total: int) -> None:
            report(ServerState.PROFILING if stage == "profile" else ServerState.LOADING)
            _log.info("%s %d/%d", stage, done, total)

        return open_engine(bundle, engine_options, progress)

    identity = Identity.of(read_manifest(bundle), engine_options.policy, engine_options.max_queue)
    return asyncio.run(run(identity, opener, options))


async def run(identity: Identity, opener: Opener, options: ServeOptions) -> int:
    """Bind, load, serve, and drain at the first SIGTERM or SIGINT; a second one cuts the grace time short.

    0 when every stream could finish, 1 when some were cut or the engine had failed.
    """
    format_logs(options.log_format)
    transport, watchers, callers = Transport.of(options), watching_sidecars(options), calling_sidecars(options)
    with _signals() as (stop, hurry):
        async with contextlib.AsyncExitStack() as sidecars:
            server = DcutServer(identity, transport)
            server.host.observers.append(RequestLog())
            await server.bind(options.host, options.port)
            try:
                for sidecar in watchers:
                    print(await sidecars.enter_async_context(sidecar(server)), flush=True)
                await _open_unless(stop, server, opener)
                print(f"dcut-trt serving on {server.address}", flush=True)
                for sidecar in callers:
                    print(await sidecars.enter_async_context(sidecar(server)), flush=True)
            except BaseException:
                await server.shut_down(0.0, stop)  # a gRPC server that nobody stopped keeps the process alive
                raise
            stats = _start_stats(server) if options.stats else None
            await stop.wait()
            healthy = server.host.state is not ServerState.FAILED
            finished = await server.shut_down(options.grace_seconds, hurry)
            if stats is not None:
                stats.cancel()
        return 0 if finished and healthy else 1


async def _open_unless(stop: asyncio.Event, server: DcutServer, opener: Opener) -> None:
    """Load and warm the engine. Does not return from a signal meanwhile: the process ends."""
    opening = asyncio.create_task(server.open(opener))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not opening.done():
        _log.warning("stopped while the engine was %s", server.host.state.value)
        # The loading thread runs native code that cannot be interrupted, and nobody has been served yet.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    await opening


@contextlib.contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Two events: set by the first and by the second SIGTERM or SIGINT."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def note() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in numbers:
        loop.add_signal_handler(number, note)
    try:
        yield stop, hurry
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _start_stats(server: DcutServer) -> asyncio.Task[None]:
    engine = server.host.require_engine()
    return asyncio.create_task(print_stats(engine, lambda line: print(line, file=sys.stderr, flush=True)))
