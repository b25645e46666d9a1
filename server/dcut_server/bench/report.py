"""The report of a benchmark: tables for a person, one JSON document for everything else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dcut_server.bench.summary import DFLASH, PLAIN, Cell, PolicyMean, policy_means

KIND, SCHEMA = "dcut-trt bench", 2
NARROWEST = 120  # columns; a log file has no width of its own
THROUGHPUT_LEGEND = (
    "tokens/s: output tokens over wall time, prefill included, while so many are live; "
    "spread: (max - min) / median over rounds; of best: of the fastest policy beside it; "
    "tau: tokens per request and decoding step; verified: rows of all B * (D + 1)"
)
TIME_LEGEND = (
    "host: all of a step in which no network runs; prefill: share of the wall time; "
    "gap: milliseconds per token, after the first"
)


def report_document(facts: dict[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """The JSON document. facts: what was measured, and on what."""
    shown = {
        "means": [dataclasses.asdict(mean) for mean in policy_means(cells)],
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }
    return {"schema": SCHEMA, "kind": KIND, **facts, **shown}


def write_json(document: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def throughput_table(cells: Sequence[Cell], title: str) -> Table:
    """Tokens per second, and what speculation did for them."""
    columns = ("live", "policy", "tokens/s", "spread", "of best", "x plain", "(rounds)", "tau", "verified")
    shown = table(title, (*columns, "differing tokens"))
    for cell, first in _grouped(cells):
        shown.add_row(
            f"{cell.concurrency}" if first else "",
            cell.policy,
            f"[bold]{cell.tokens_per_s:.1f}[/bold]" if cell.of_best == 1 else f"{cell.tokens_per_s:.1f}",
            f"{cell.spread:.0%}",
            f"{cell.of_best:.1%}",
            "-" if cell.speedup is None else f"{cell.speedup:.2f}",
            _rounds(cell),
            f"{cell.tau:.2f}",
            f"{cell.keep_ratio:.0%}",
            _differing(cell),
            end_section=_last(cell, cells),
        )
    return shown


def time_table(cells: Sequence[Cell], title: str) -> Table:
    """Where the time of a decoding step goes, and what a reader waits for."""
    columns = ("live", "policy", "step ms", "draft", "select", "verify", "rest", "host", "prefill")
    shown = table(title, (*columns, "TTFT p50/p95", "gap p50/p95"))
    for cell, first in _grouped(cells):
        times = cell.step_ms
        shown.add_row(
            f"{cell.concurrency}" if first else "",
            cell.policy,
            f"{times.step:.2f}",
            *(_part(part, times.step) for part in (times.draft, times.select, times.verify, times.rest, times.host)),
            f"{cell.prefill_share:.0%}",
            f"{cell.ttft_ms.p50:.0f} / {cell.ttft_ms.p95:.0f}",
            f"{cell.inter_token_ms.p50:.1f} / {cell.inter_token_ms.p95:.1f}",
            end_section=_last(cell, cells),
        )
    return shown


def means_table(means: Sequence[PolicyMean], title: str) -> Table:
    """Every policy in one line: geometric means over all cells."""
    shown = table(title, ("policy", "cells", "x plain", f"x {DFLASH}", "of best"))
    for mean in means:
        over = ("-" if value is None else f"{value:.3f}" for value in (mean.over_plain, mean.over_dflash))
        shown.add_row(mean.policy, f"{mean.cells}", *over, f"{mean.of_best:.1%}")
    return shown


def lossless_line(cells: Sequence[Cell], precision: str) -> str:
    """Whether all outputs equal those of plain decoding."""
    differences = [cell.difference for cell in cells if cell.difference is not None and cell.policy != PLAIN]
    if not differences:
        return "lossless check: none, it needs the policy plain beside others, and temperature 0"
    differing, compared = (sum(getattr(found, name) for found in differences) for name in ("tokens", "compared"))
    if differing == 0:
        return f"lossless check: passed, all {compared} output tokens equal those of plain decoding"
    found = f"{differing} of {compared} output tokens differ from plain decoding"
    if precision == "fp32":
        return f"lossless check: FAILED, {found}"
    return (
        f"lossless check: {found}; {precision} rounds near-ties differently in batches of another shape, "
        "and two texts that part stay apart (fp32 has no such places)"
    )


def table(title: str, columns: Iterable[str]) -> Table:
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        shown.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    return shown


def _grouped(cells: Sequence[Cell]) -> list[tuple[Cell, bool]]:
    """Every cell, and whether it is the first of its concurrency."""
    before = [None, *(cell.concurrency for cell in cells)]
    return [(cell, cell.concurrency != last) for cell, last in zip(cells, before, strict=False)]


def _last(cell: Cell, cells: Sequence[Cell]) -> bool:
    return cell is [other for other in cells if other.concurrency == cell.concurrency][-1]


def _rounds(cell: Cell) -> str:
    if not cell.speedup_rounds or cell.policy == PLAIN:
        return ""
    return f"{min(cell.speedup_rounds):.2f}-{max(cell.speedup_rounds):.2f}"


def _differing(cell: Cell) -> str:
    if cell.difference is None or cell.policy == PLAIN:
        return "-"
    found = cell.difference
    where = f" in {found.requests} of {cell.requests} requests" if found.tokens else ""
    return f"{found.tokens}{where}"


def _part(part_ms: float, step_ms: float) -> str:
    share = part_ms / step_ms if step_ms else 0.0
    return f"{part_ms:.2f} {share:>4.0%}" if part_ms < 10 else f"{part_ms:.1f} {share:>4.0%}"
