"""Measure what a whole step costs on this machine, and fill the cost table with it."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median

import numpy as np

from dcut_trt.engine import Engine
from dcut_trt.errors import CostTableError
from dcut_trt.spec.cost_table import ContextCost, CostTable, load_cost_table, save_cost_table
from dcut_trt.spec.packing import block_depths
from dcut_trt.spec.rules import FixedRatio
from dcut_trt.spec.sweep import Bypass, Progress, Series, Sweep, Turn, batches_that_fit, most_that_fit, request_shape
from dcut_trt.stage_types import BatchView, Intent

logger = logging.getLogger(__name__)

ROUNDS = 3  # in each, every ratio runs a few steps in a row
STEPS, SHORT_STEPS = 3, 2  # of a ratio, and of a short block; the first of them is set apart
LONG_CONTEXT = 512  # rows per request; what context costs is measured between this and that of the other steps
LONG_BATCH = 4  # no larger one: its long prompts must be computed first


class _ShortBlock(Bypass):
    """Draft the first tokens of a block, and verify none of them."""

    name = "short block"

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def intend(self, view: BatchView) -> Intent:
        return Intent(self.depth)


@dataclass(frozen=True, slots=True)
class _Row:
    """What one batch size took. ratios: [R].  short: by depth, empty where blocks are whole.  long: the cheapest ratio,
    the dearest and plain decoding in a long context, empty where that was not measured."""

    ratios: list[Series]
    plain: Series
    short: list[Series]
    long: list[Series]


def profile(
    engine: Engine, ratios: tuple[float, ...], fingerprint: str, progress: Progress = lambda done, total: None
) -> CostTable:
    """Time whole engine steps for every captured batch size and ratio, for plain decoding, for short blocks where the
    drafter allows them, and for a long context at one batch size.

    Ratios take turns, so that a noisy moment hits all alike. The engine must be idle; it is idle after.
    """
    measured = _measure(engine, ratios, ROUNDS, progress)
    depths = _depths(engine)
    rows = measured.values()
    table = CostTable(
        batches=tuple(measured),
        ratios=ratios,
        cost_ms=np.array([[series.step_ms for series in row.ratios] for row in rows]),
        plain_ms=np.array([row.plain.step_ms for row in rows]),
        fingerprint=fingerprint,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        depths=depths,
        draft_ms=None if depths is None else np.array([_draft_ms(row) for row in rows]),
        context_ms=next((_context_cost(batch, row) for batch, row in measured.items() if row.long), None),
        context_rows=fmean(series.context for row in rows for series in (*row.ratios, row.plain)),
        switch_ms=_switch_ms(rows),
    )
    return table.with_state("flat") if table.flat else table


def warm_up(engine: Engine, ratios: tuple[float, ...], progress: Progress = lambda done, total: None) -> None:
    """Run every captured shape once, so that no request pays for the compilation of its kernels."""
    _measure(engine, ratios, 0, progress)


def obtain_cost_table(
    engine: Engine,
    ratios: tuple[float, ...],
    fingerprint: str,
    path: Path,
    *,
    measure: bool = True,
    progress: Progress = lambda done, total: None,
) -> CostTable | None:
    """The saved table when it is of this bundle and machine, else a new one, saved for the next start; warms up.

    Whatever is wrong with a saved table is logged as a warning. measure False uses a stale table rather than none.
    """
    table = _load(path, ratios, fingerprint)
    if measure and (table is None or table.state == "stale"):
        table = profile(engine, ratios, fingerprint, progress)
        _save(table, path)
    else:
        warm_up(engine, ratios, progress)
    if table is None:
        logger.warning("cost table: none, and measuring is off; rules that need one cannot choose")
    else:
        _warn_if_flat(table)
    return table


def adopt_cost_table(engine: Engine, path: Path, fingerprint: str, progress: Progress) -> CostTable:
    """The table that an operator names, as it is, even if it was measured elsewhere; warms up.

    Raises CostTableError when the file cannot be read or holds impossible values.
    """
    table = load_cost_table(path, fingerprint)
    _warn_if_stale(table, path, fingerprint)
    _warn_if_flat(table)
    warm_up(engine, table.ratios, progress)
    return table


def _warn_if_flat(table: CostTable) -> None:
    if table.flat:
        logger.warning("cost table: flat, all ratios cost the same within 5 %%; dcut verifies every draft")


def _warn_if_stale(table: CostTable, path: Path, fingerprint: str) -> None:
    if table.state == "stale":
        logger.warning("cost table: stale, %s was measured on [%s], this is [%s]", path, table.fingerprint, fingerprint)


def _save(table: CostTable, path: Path) -> None:
    try:
        save_cost_table(table, path)
    except OSError as error:
        logger.warning("cost table: cannot be saved to %s (%s); the next start measures again", path, error)


def machine_fingerprint(bundle_key: str, runtime: str, threads: int | None) -> str:
    """What a cost table depends on: the bundle, the runtime's version, the processor and the threads."""
    return f"{bundle_key[:16]}; {runtime}; {_processor()}; threads {threads or 'auto'}"


def _load(path: Path, ratios: tuple[float, ...], fingerprint: str) -> CostTable | None:
    if not path.exists():
        return None
    try:
        table = load_cost_table(path, fingerprint)
    except CostTableError as error:
        logger.warning("cost table: invalid, it is ignored: %s", error)
        return None
    _warn_if_stale(table, path, fingerprint)
    if table.ratios != ratios:
        logger.warning("cost table: %s has ratios %s, the bundle has %s; it is ignored", path, table.ratios, ratios)
        return None
    return table


def _measure(engine: Engine, ratios: tuple[float, ...], rounds: int, progress: Progress) -> dict[int, _Row]:
    """By captured batch size; 0 rounds runs every shape once and keeps nothing apart."""
    steps, short_steps = (STEPS, SHORT_STEPS) if rounds else (1, 1)
    plain = Turn(Bypass(), steps, verifies=False)
    drafting = [Turn(FixedRatio(ratio), steps) for ratio in ratios]
    short = [Turn(_ShortBlock(depth), short_steps, verifies=False) for depth in (_depths(engine) or ())[:-1]]
    turns = [*drafting, plain, *short]
    shape = request_shape(engine, engine.limits.max_batch, turns, max(rounds, 1))
    batches = batches_that_fit(engine, shape)
    extremes = [drafting[int(np.argmin(ratios))], drafting[int(np.argmax(ratios))], plain]
    long_shape = request_shape(engine, LONG_BATCH, extremes, rounds, LONG_CONTEXT)
    long_batch = _long_batch(engine, batches, long_shape) if rounds else None
    measured: dict[int, _Row] = {}
    with Sweep(engine) as sweep:
        for done, batch in enumerate(batches):
            progress(done, len(batches))
            row = sweep.run(batch, turns, max(rounds, 1), shape)
            long = sweep.run(batch, extremes, rounds, long_shape) if batch == long_batch else []
            measured[batch] = _Row(row[: len(ratios)], row[len(ratios)], row[len(ratios) + 1 :], long)
    progress(len(batches), len(batches))
    return measured


def _depths(engine: Engine) -> tuple[int, ...] | None:
    """Block depths whose pass is timed; None on a device, whose passes end after the call does."""
    length, limits = engine.limits.draft_length, engine.limits
    if limits.short_blocks:
        return block_depths(length)
    return (length,) if limits.any_budget else None


def _long_batch(engine: Engine, batches: tuple[int, ...], shape: tuple[int, int]) -> int | None:
    """The batch size to measure a long context at; None where no request can be long enough."""
    if shape[0] < LONG_CONTEXT:
        return None
    most = min(most_that_fit(engine, shape), LONG_BATCH)
    return max((batch for batch in batches if batch <= most), default=None)


def _draft_ms(row: _Row) -> list[float]:
    """[depths] of the drafter's pass; the whole block is timed in the steps of all ratios."""
    whole = [record.draft_ms for series in row.ratios for record in series.later]
    return [*(median(record.draft_ms for record in series.later) for series in row.short), median(whole)]


def _context_cost(batch: int, row: _Row) -> ContextCost:
    """Slopes between the profiled context and the long one; noise may make none of them negative."""
    cheapest, dearest, plain = row.long
    shorts = [_of_rows(row.ratios, series) for series in (cheapest, dearest)]
    low, high = (_slope(short, long) for short, long in zip(shorts, (cheapest, dearest), strict=True))
    few, many = cheapest.rows, dearest.rows
    per_row = max(0.0, (high - low) / (many - few)) if many > few else 0.0
    per_request = max(0.0, (low + high) / 2 - per_row * (few + many) / 2) / batch
    return ContextCost(plain=max(0.0, _slope(row.plain, plain)) / batch, request=per_request, row=per_row)


def _of_rows(candidates: Sequence[Series], like: Series) -> Series:
    return next(series for series in candidates if series.rows == like.rows)


def _slope(short: Series, long: Series) -> float:
    """Milliseconds per 1,000 rows of context per request."""
    return (long.step_ms - short.step_ms) * 1000 / (long.context - short.context)


def _switch_ms(rows: Iterable[_Row]) -> float:
    """Of the first steps after another ratio's; those of the first round may have compiled a kernel."""
    changed = [(series, record) for row in rows for series in row.ratios[1:] for record in series.first[1:]]
    return max(0.0, median(record.step_ms - series.step_ms for series, record in changed)) if changed else 0.0


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
