"""dcut-trt demo."""

from __future__ import annotations

import argparse
from typing import Any


def add_demo_parser(commands: Any) -> None:
    commands.add_parser("demo", help="build a small model, serve it to eight clients, compare with plain decoding")


def run_demo(_args: argparse.Namespace) -> int:
    from dcut_server.demo import main  # noqa: PLC0415 - loads the runtimes and the build tools

    return main()
