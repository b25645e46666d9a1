"""dcut-trt serve."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from dcut_server.cli_options import add_engine_flags, engine_options


def add_serve_parser(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve an engine bundle over gRPC")
    parser.add_argument("bundle", type=Path, metavar="DIR", help="what dcut-trt build made")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1; calls are not encrypted")
    parser.add_argument("--port", type=int, default=50051, help="0 takes a free one (default: 50051)")
    parser.add_argument("--grace-seconds", type=float, default=30.0, metavar="S", help="for live streams at SIGTERM")
    parser.add_argument("--stats", action="store_true", help="one line a second even when stderr is no terminal")
    add_engine_flags(parser)


def run_serve(args: argparse.Namespace) -> int:
    # gRPC's own log repeats what our errors say, and complains about the short-lived helpers that libraries fork.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from dcut_server.main import ServeOptions, serve  # noqa: PLC0415 - loads gRPC and the runtimes

    options = ServeOptions(
        host=args.host,
        port=args.port,
        grace_seconds=args.grace_seconds,
        stats=args.stats or sys.stderr.isatty(),
    )
    return serve(args.bundle, engine_options(args), options)
