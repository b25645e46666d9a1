"""`dcut-trt simulate`: policies over a cost table and recorded or generated drafts, without an engine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dcut_server.bench.cli import integers
from dcut_server.simulate import lab
from dcut_server.simulate.costs import SHIPPED, Costs, load_costs
from dcut_server.simulate.oracles import ORACLES
from dcut_server.simulate.paper import DATASETS, Comparison, median_error, paper_trace, within
from dcut_server.simulate.traces import RECORDED, Trace, load_recorded, load_trace
from dcut_server.simulate.world import SimulationError
from dcut_trt.spec.policies import POLICY_NAMES

DEFAULT_POLICIES = ("dflash", "ratio:0.25", "ratio:0.5", "ratio:0.75", "dcut", "auto", *ORACLES)
WIDEST = 120  # columns; a table is not squeezed below what it needs where the output is no terminal


def add_simulate_parser(commands: Any) -> None:
    """Add `simulate` to the commands of dcut-trt; run_simulate takes what it parses."""
    defaults = lab.Run()
    parser = commands.add_parser(
        "simulate",
        help="compare policies over a cost table, without an engine",
        description="Replay recorded drafts, or drafts drawn from what the D-cut paper reports of a dataset, over a "
        f"table of step costs. Policies: {POLICY_NAMES}; and {', '.join(ORACLES)}, which know what will be accepted.",
    )
    add = parser.add_argument
    add("--cost", default="h20", metavar="NAME|FILE", help=f"{', '.join(SHIPPED)} or a cost_table.json (default: h20)")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--trace", metavar="NAME|FILE", help=f"{', '.join(RECORDED)}, or what dcut-trt record wrote")
    drafts.add_argument("--acceptance", default="gsm8k", choices=DATASETS, help="generated drafts (default: gsm8k)")
    add("--concurrency", type=integers, default=(16, 32, 64), metavar="C,..", help="default: 16,32,64")
    policies = ",".join(DEFAULT_POLICIES)
    add("--policies", default=policies, metavar="P,..", help=f"default: {policies}")
    add("--budgets", default="ratios", choices=("any", "ratios"), help="rows that the target can run (default: ratios)")
    add("--steps", type=int, default=defaults.steps, metavar="N", help=f"measured steps (default: {defaults.steps})")
    add("--warm-up", type=int, default=defaults.warm_up, metavar="N", help=f"before them (default: {defaults.warm_up})")
    add("--seed", type=int, default=defaults.seed, metavar="N", help="of generated drafts, and of where texts begin")
    add("--paper-table2", action="store_true", help="simulate all cells of the paper's Table 2 beside the published")
    add("--json", type=Path, metavar="FILE", help="write what was simulated; dcut-trt report draws it")


def run_simulate(args: argparse.Namespace) -> int:
    """0. Raises SimulationError, TraceError, CostTableError or UnsupportedOption for what cannot be simulated."""
    run = lab.Run(args.steps, args.warm_up, args.seed, args.budgets == "any", paired=args.trace is None)
    for option, value, least in (("--steps", run.steps, 1), ("--warm-up", run.warm_up, 0), ("--seed", run.seed, 0)):
        if value < least:
            raise SimulationError(f"{option} {value}: must be at least {least}")
    if args.json is not None and (not args.json.parent.is_dir() or args.json.is_dir()):
        raise SimulationError(f"--json {args.json}: must name a file in a directory that exists")
    console = Console() if sys.stdout.isatty() else Console(width=WIDEST)
    document: dict[str, Any] = {
        "schema": 1,
        "kind": "dcut-trt simulation",
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["dcut-trt", *sys.argv[1:]],
        "run": dataclasses.asdict(run),
    }
    if args.paper_table2:
        comparisons = lab.paper_table2(run)
        console.print(paper_table(comparisons))
        console.print(paper_summary(comparisons), highlight=False)
        document["table2"] = [comparison_facts(cell) for cell in comparisons]
    else:
        costs, trace = load_costs(args.cost), _trace(args, run)
        cells = _cells(args, costs, trace, run)
        notes = f"costs: {costs.source}; drafts: {trace.source}"
        passes = max(cell.passes for cell in cells)
        if trace.tokens is not None and passes > 1:
            notes += f"; texts were begun up to {passes:.1f} times, so a policy that learns words met some again"
        console.print(cells_table(cells))
        console.print(notes, style="dim", markup=False, highlight=False)
        table = {"batches": costs.table.batches, "ratios": costs.table.ratios, "cost_ms": costs.table.cost_ms.tolist()}
        plain_ms = None if costs.table.plain_ms is None else costs.table.plain_ms.tolist()
        document |= {
            "notes": notes,
            "cells": [cell_facts(cell, trace.draft_length) for cell in cells],
            "cost_tables": {costs.name: table | {"plain_ms": plain_ms}},
        }
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def cells_table(cells: Sequence[lab.Cell]) -> Table:
    """Each against the first policy at its concurrency."""
    first = cells[0].policy
    table = Table("live", "policy", "tokens/s", f"x {first}", "tokens/step", "rows/step", "tokens/row", "ms/step")
    for column in (table.columns[0], *table.columns[2:]):
        column.justify = "right"
    base: dict[int, float] = {}
    for cell in cells:
        totals = cell.totals
        against = totals.tokens_per_s / base.setdefault(totals.batch, totals.tokens_per_s)
        numbers = (
            f"{totals.tokens_per_s:.0f}",
            f"{against:.3f}",
            f"{totals.tokens_per_step:.2f}",
            f"{totals.rows / totals.steps:.0f}",
            f"{totals.tokens_per_row:.3f}",
            f"{totals.ms / totals.steps:.2f}",
        )
        table.add_row(str(totals.batch), cell.policy, *numbers)
    return table


def paper_table(cells: Sequence[Comparison]) -> Table:
    """Published and simulated speed-up over DFlash, and how far off."""
    table = Table("device", "dataset", "live", "policy", "published", "simulated", "off by")
    for cell in cells:
        numbers = f"{cell.published:.3f}", f"{cell.simulated():.3f}", f"{100 * cell.error():+.1f} %"
        table.add_row(cell.device, cell.dataset, str(cell.concurrency), cell.method, *numbers)
    for column in (table.columns[2], *table.columns[4:]):
        column.justify = "right"
    return table


def paper_summary(cells: Sequence[Comparison]) -> str:
    errors = [cell.error() for cell in cells]
    return (
        f"{within(errors, 0.05)} of {len(cells)} within 5 %, {within(errors, 0.10)} within 10 %, "
        f"{100 * median_error(errors):.1f} % off at the median"
    )


def comparison_facts(cell: Comparison) -> dict[str, Any]:
    return dataclasses.asdict(cell) | {"simulated": cell.simulated(), "error": cell.error()}


def cell_facts(cell: lab.Cell, draft_length: int) -> dict[str, Any]:
    """As dcut-trt report reads it."""
    totals = cell.totals
    return {
        "policy": cell.policy,
        "concurrency": totals.batch,
        "dataset": cell.trace,
        "device": cell.costs,
        "tokens_per_s": totals.tokens_per_s,
        "tau": totals.tokens_per_step,
        "keep_ratio": totals.rows / (totals.steps * totals.batch * (draft_length + 1)),
        **dataclasses.asdict(totals),
    }


def _trace(args: argparse.Namespace, run: lab.Run) -> Trace:
    if args.trace is None:
        return paper_trace(args.acceptance, run.seed)
    return load_recorded(args.trace) if args.trace in RECORDED else load_trace(Path(args.trace).expanduser())


def _cells(args: argparse.Namespace, costs: Costs, trace: Trace, run: lab.Run) -> list[lab.Cell]:
    names = [name.strip() for name in args.policies.split(",")]
    policies = tuple(dict.fromkeys(name for name in names if name))
    if not policies:
        raise SimulationError("--policies: names no policy")
    return [cell for batch in args.concurrency for cell in lab.simulate(trace, costs, batch, policies, run)]
