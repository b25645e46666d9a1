"""dcut-trt export-schedule: a bundle's cost table as TensorRT-LLM's draft_len_schedule."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dcut_server.draft_schedule import UniformDepth, check_acceptance, measured_acceptance, to_yaml, uniform_depths
from dcut_trt.errors import UnsupportedOption
from dcut_trt.manifest import read_manifest
from dcut_trt.spec.cost_table import COST_TABLE_NAME, load_cost_table


def add_export_schedule_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "export-schedule",
        help="write the cost table as TensorRT-LLM's draft_len_schedule",
        description="Write the YAML that trtllm-serve takes: per batch size the uniform draft length with the most "
        "expected tokens per millisecond under this bundle's measured costs.",
    )
    parser.add_argument("bundle", type=Path, metavar="DIR", help="what dcut-trt build made, after it was served once")
    parser.add_argument(
        "--acceptance",
        required=True,
        metavar="A,..|FILE",
        help="for k = 1..D the share of blocks whose first k drafts are all accepted; or a JSON file: that list, or a "
        "report of dcut-trt bench --json that has the policy dflash (the mean of its cells, weighted by blocks)",
    )
    parser.add_argument("--cost-table", type=Path, metavar="FILE", help="use this table instead of the bundle's own")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the YAML to write")


def run_export_schedule(args: argparse.Namespace) -> int:
    """0. Raises BundleError, CostTableError or UnsupportedOption for what cannot be exported."""
    manifest = read_manifest(args.bundle)
    path = args.cost_table or args.bundle / COST_TABLE_NAME
    acceptance = _acceptance(args.acceptance)
    check_acceptance(acceptance, manifest.draft_length)
    table = load_cost_table(path, fingerprint="")
    depths = uniform_depths(table, acceptance)
    text = to_yaml(depths, manifest.drafter.identity, f"{path}, measured {table.measured_at}")
    try:
        args.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnsupportedOption(f"--out {args.out}: {error.strerror}") from error
    Console().print(depths_table(depths))
    return 0


def depths_table(depths: list[UniformDepth]) -> Table:
    """For a person; the file holds batch and draft length alone."""
    table = Table("batch", "draft length", "tokens per request", "ms per step", "tokens/ms")
    for column in table.columns:
        column.justify = "right"
    for entry in depths:
        numbers = f"{entry.tokens:.2f}", f"{entry.cost_ms:.3f}", f"{entry.tokens_per_ms:.3f}"
        table.add_row(str(entry.batch), str(entry.depth), *numbers)
    return table


def _acceptance(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        pass
    try:
        values = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedOption(f"--acceptance {text}: neither numbers nor a readable JSON file: {error}") from error
    if isinstance(values, dict) and "cells" in values:
        try:
            return measured_acceptance(values)
        except (TypeError, KeyError, ValueError) as error:
            raise UnsupportedOption(f"--acceptance {text}: not as dcut-trt bench writes it: {error!r}") from error
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise UnsupportedOption(f"--acceptance {text}: a JSON list of numbers is needed, or a report of dcut-trt bench")
    return [float(value) for value in values]
