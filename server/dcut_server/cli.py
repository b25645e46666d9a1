"""The command line: dcut-trt build, serve, client, generate, inspect, bench, simulate, record, demo and more."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version

from dcut_trt.errors import DcutError

# Command, module that holds add_<command>_parser and run_<command>. Modules import what is heavy when they run.
COMMANDS = {
    "build": "dcut_engines.cli",
    "train-drafter": "dcut_server.cli_train_drafter",
    "serve": "dcut_server.cli_serve",
    "client": "dcut_server.cli_client",
    "generate": "dcut_server.cli_generate",
    "inspect": "dcut_server.cli_inspect",
    "bench": "dcut_server.bench.cli",
    "record": "dcut_server.simulate.record_cli",
    "simulate": "dcut_server.simulate.cli",
    "bench-paths": "dcut_server.bench.paths_cli",
    "report": "dcut_server.report_page.cli",
    "soak": "dcut_server.soak.cli",
    "demo": "dcut_server.cli_demo",
    "export-schedule": "dcut_server.cli_export",
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0, or 2 with one line on stderr for an error that the caller can act on."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return int(args.run(args))
    except DcutError as error:
        print(f"dcut-trt: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dcut-trt", description="Batched speculative decoding with D-cut pruning")
    parser.add_argument("--version", action="version", version=f"dcut-trt {version('dcut-trt')}")
    parser.add_argument(
        "--log-level", default="warning", choices=("debug", "info", "warning", "error"), help="default: warning"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, name in COMMANDS.items():
        module, function = importlib.import_module(name), command.replace("-", "_")
        getattr(module, f"add_{function}_parser")(commands)
        commands.choices[command].set_defaults(run=getattr(module, f"run_{function}"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
