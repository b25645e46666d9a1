"""`serve --openai-port 0` as a process, over the scripted model of tests/server: python scripted_openai.py DELAY_S."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "server"))

from live_server import identity_of

from dcut_server.main import run
from dcut_server.serve_options import ServeOptions
from dcut_trt.backends.scripted import scripted_engine

if __name__ == "__main__":
    logging.basicConfig(level="WARNING")
    engine = scripted_engine(max_len=4096, delay_s=float(sys.argv[1]), mean_length=1e9)
    options = ServeOptions(port=0, openai_port=0, grace_seconds=60)
    sys.exit(asyncio.run(run(identity_of(engine), lambda _report: engine, options)))
