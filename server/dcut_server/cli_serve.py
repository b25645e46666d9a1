"""dcut-trt serve."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcut_server.cli_options import add_engine_flags, engine_options
from dcut_server.ops.flags import add_operations_flags, operations_options

if TYPE_CHECKING:
    from dcut_server.serve_options import ServeOptions


def add_serve_parser(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve an engine bundle over gRPC")
    parser.add_argument("bundle", type=Path, metavar="DIR", help="what dcut-trt build made")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1; elsewhere use --tls-cert")
    parser.add_argument("--port", type=int, default=50051, help="0 takes a free one (default: 50051)")
    parser.add_argument("--grace-seconds", type=float, default=30.0, metavar="S", help="for live streams at SIGTERM")
    parser.add_argument("--stats", action="store_true", help="one line a second even when stderr is no terminal")
    parser.add_argument("--openai-port", type=int, metavar="P", help="also serve OpenAI's HTTP API, through smg")
    parser.add_argument("--dashboard-port", type=int, metavar="P", help="also serve a live page for a browser")
    parser.add_argument("--metrics-port", type=int, metavar="P", help="also serve Prometheus metrics at /metrics")
    add_operations_flags(parser)
    add_engine_flags(parser)


def run_serve(args: argparse.Namespace) -> int:
    # gRPC's own log repeats what our errors say, and complains about the short-lived helpers that libraries fork.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from dcut_server.main import serve  # noqa: PLC0415 - loads gRPC and the runtimes

    return serve(args.bundle, engine_options(args), serve_options(args))


def serve_options(args: argparse.Namespace) -> ServeOptions:
    """Raises UnsupportedOption naming option, value and limit."""
    from dcut_server.serve_options import ServeOptions  # noqa: PLC0415

    return ServeOptions(
        host=args.host,
        port=args.port,
        grace_seconds=args.grace_seconds,
        stats=args.stats or sys.stderr.isatty(),
        openai_port=args.openai_port,
        dashboard_port=args.dashboard_port,
        metrics_port=args.metrics_port,
        **operations_options(args),
    )
