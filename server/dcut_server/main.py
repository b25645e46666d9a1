"""`dcut-trt serve`: one process, one engine, one gRPC server, from start to signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dcut_server.host import Identity, ServerState
from dcut_server.lifecycle import DcutServer, Opener
from dcut_server.stats import print_stats
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.errors import UnsupportedOption
from dcut_trt.manifest import read_manifest

MAX_PORT = 65535

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Raises UnsupportedOption naming option, value and limit.

    host, port: where to listen, port 0 takes a free one.  stats: print one line a second.
    grace_seconds: how long live streams may go on after a signal.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    grace_seconds: float = 30.0
    stats: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:  # gRPC would take it modulo 2**16
            raise UnsupportedOption(f"port={self.port}: must be in [0, {MAX_PORT}]")
        if not (math.isfinite(self.grace_seconds) and self.grace_seconds >= 0):
            raise UnsupportedOption(f"grace_seconds={self.grace_seconds}: must be finite and at least 0")


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
    with _signals() as (stop, hurry):
        server = DcutServer(identity)
        await server.bind(options.host, options.port)
        await _open_unless(stop, server, opener)
        print(f"dcut-trt serving on {server.address}", flush=True)
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
    try:
        await opening
    except Exception:
        await server.shut_down(0.0, stop)
        raise


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
