"""The real command line over the scripted model: python scripted_cli.py DELAY_S FLAGS OF SERVE."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "server"))

from live_server import identity_of

from dcut_server import main as serving
from dcut_server.cli import main
from dcut_server.serve_options import ServeOptions
from dcut_trt.backends.scripted import scripted_engine

if __name__ == "__main__":
    delay_s, flags = float(sys.argv[1]), sys.argv[2:]

    def serve(_bundle: Path, _engine_options: Any, options: ServeOptions) -> int:
        engine = scripted_engine(max_len=4096, delay_s=delay_s)
        return asyncio.run(serving.run(identity_of(engine), lambda _report: engine, options))

    serving.serve = serve
    sys.exit(main(["--log-level", "info", "serve", "scripted", "--port", "0", *flags]))
