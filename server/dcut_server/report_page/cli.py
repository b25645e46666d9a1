"""`dcut-trt report`: one HTML page of what was measured and simulated."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def add_report_parser(commands: Any) -> None:
    """Add `report`; run_report takes what it parses."""
    parser = commands.add_parser("report", help="draw results of bench and simulate as one HTML page")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.json", help="what --json of these has written")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.html", help="the page; it needs no other file")


def run_report(args: argparse.Namespace) -> int:
    """Write the page. Raises InvalidReport for a file that cannot be drawn, and for a place that cannot be written."""
    from dcut_server.bench import environment  # noqa: PLC0415 - loads numpy
    from dcut_server.report_page.documents import read_document  # noqa: PLC0415
    from dcut_server.report_page.fields import InvalidReport  # noqa: PLC0415
    from dcut_server.report_page.page import render_page  # noqa: PLC0415

    if args.out.resolve() in [path.resolve() for path in args.files]:
        raise InvalidReport(f"--out {args.out}: must not be one of the files that are read")
    documents = [read_document(path) for path in args.files]
    facts = (
        ("made", datetime.now(UTC).isoformat(timespec="seconds")),
        ("by", f"dcut-trt {environment.versions()['dcut-trt']}"),
        ("command", " ".join(environment.command_line())),
    )
    try:
        args.out.write_text(render_page(documents, facts), encoding="utf-8")
    except OSError as error:
        raise InvalidReport(f"--out {args.out}: cannot be written: {error.strerror}") from error
    print(f"wrote {args.out}")
    return 0
