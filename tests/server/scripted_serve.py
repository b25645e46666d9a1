"""`serve` as a process, over the scripted model: python scripted_serve.py DELAY_S GRACE_S [FAULT]."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from live_server import identity_of

from dcut_server.host import ServerState
from dcut_server.main import ServeOptions, run
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.errors import EngineMismatch


def main(delay_s: float, grace_s: float, fault: str) -> int:
    engine = scripted_engine(max_len=4096, delay_s=delay_s)

    def opener(report: Callable[[ServerState], Any]) -> Engine:
        if fault == "loading":
            time.sleep(60)
        if fault == "mismatch":
            raise EngineMismatch("plan was built for another machine")
        report(ServerState.PROFILING)
        if fault == "warm-up":
            engine.target.forward = lambda *_: 1 / 0
        return engine

    return asyncio.run(run(identity_of(engine), opener, ServeOptions(port=0, grace_seconds=grace_s, stats=True)))


if __name__ == "__main__":
    logging.basicConfig(level="WARNING")
    sys.exit(main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""))
