"""dcut-trt demo: everything at once, on the embedded model."""

from __future__ import annotations

import argparse
from typing import Any


def add_demo_parser(commands: Any) -> None:
    commands.add_parser("demo", help="build the embedded model, serve it, stream to eight clients, compare policies")


def run_demo(_args: argparse.Namespace) -> int:
    from dcut_server.demo import main  # noqa: PLC0415 - loads everything

    return main()
