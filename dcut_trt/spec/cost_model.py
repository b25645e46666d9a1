"""What any step costs: the cost table between and beyond its entries."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.packing import budget

Floats = NDArray[np.float64]

CONTEXT_STEP = 8  # rows of context between which nothing is told apart
FLOOR = 0.1  # of a batch size's cheapest measured step: no prediction is below


@dataclass(frozen=True, slots=True)
class _Curve:
    """Drafting steps of one batch size by K, with whole blocks and the profiled context.

    rows, ms: [n] knots of a line through B..B * (D + 1), both ascending.  draft_saves: [D + 1] milliseconds that a
    block of so many tokens saves against a whole one.  places, weights: the captured batch sizes around.
    """

    rows: Floats
    ms: Floats
    draft_saves: Floats
    places: NDArray[np.intp]
    weights: Floats


class CostModel:
    """Milliseconds of a whole step for any batch size, K, block depth and context.

    Straight lines between the budgets K_rho(B) of the measured ratios, and between captured batch sizes at equal rows
    per request. More rows never cost less, whatever the noise of the table. Where a step without drafting and the
    drafter's pass were measured, their sum is the drafting step with K = B; else nothing is known below the smallest
    ratio, and it costs what that costs.
    """

    def __init__(self, table: CostTable, draft_length: int) -> None:
        self.table = table
        self.draft_length = draft_length
        self._captured = [self._captured_curve(place) for place in range(len(table.batches))]
        self._curve = functools.lru_cache(maxsize=1024)(self._curve_at)
        self._every_step_ms = functools.lru_cache(maxsize=1024)(self._every_step_ms_at)
        self._plain_ms = functools.lru_cache(maxsize=1024)(self._plain_ms_at)

    @property
    def switch_ms(self) -> float:
        """What a step costs more when its K differs from that of the last one, and which is in no other number here; 0
        where it was not measured."""
        return self.table.switch_ms or 0.0

    def step_ms(self, batch: int, rows: NDArray[np.integer], depth: int, context: float) -> Floats:
        """Of drafting steps that verify so many rows [n], each in B..B * (D + 1); non-decreasing in rows.

        depth: tokens per block, 1..D.  context: mean rows in the target's cache per request; NaN is the profiled one.
        """
        costs: Floats = self._every_step_ms(batch, depth, self._more_context(context))[rows - batch]
        return costs

    def plain_ms(self, batch: int, context: float) -> float:
        """Of a step without drafting; infinite when that was not measured."""
        return self._plain_ms(batch, self._more_context(context))

    def _every_step_ms_at(self, batch: int, depth: int, more_context: float) -> Floats:
        """Of steps with B, B + 1, .. B * (D + 1) rows."""
        curve = self._curve(batch)
        ms = curve.ms - curve.draft_saves[min(max(depth, 1), self.draft_length)]
        cost = self.table.context_ms
        if cost is not None:
            ms = ms + (cost.request * batch + cost.row * curve.rows) * more_context
        ms = np.maximum(np.maximum.accumulate(ms), FLOOR * curve.ms[0])
        costs: Floats = np.interp(np.arange(batch, batch * (self.draft_length + 1) + 1), curve.rows, ms)
        return costs

    def _plain_ms_at(self, batch: int, more_context: float) -> float:
        plain = self.table.plain_ms
        if plain is None:
            return math.inf
        curve = self._curve(batch)
        measured = float(plain[curve.places] @ curve.weights)
        cost = self.table.context_ms
        here = measured if cost is None else measured + cost.plain * batch * more_context
        return max(here, FLOOR * measured)

    def _more_context(self, context: float) -> float:
        """By how many thousand rows it exceeds the profiled one, in steps so small that no cost changes by much, so
        that a cost once known serves many steps."""
        profiled = self.table.context_rows
        if profiled is None or not math.isfinite(context):
            return 0.0
        return round((max(context, 0.0) - profiled) / CONTEXT_STEP) * CONTEXT_STEP / 1000

    def _curve_at(self, batch: int) -> _Curve:
        """Between the captured batch sizes at equal rows per request; beyond them the nearest one's, at equal rows."""
        batches = self.table.batches
        after = int(np.searchsorted(batches, batch))
        if after == len(batches) or batches[after] == batch or after == 0:
            place = min(after, len(batches) - 1)
            rows, ms = _extended(self._captured[place], batch, self.draft_length)
            places, weights = np.array([place]), np.ones(1)
        else:
            before = after - 1
            share = (batch - batches[before]) / (batches[after] - batches[before])
            places, weights = np.array([before, after]), np.array([1 - share, share])
            ends = [_extended(self._captured[place], batches[place], self.draft_length) for place in (before, after)]
            each = [knots / batches[place] for place, (knots, _) in zip((before, after), ends, strict=True)]
            per_request = np.union1d(*each)
            rows = per_request * batch
            costs = [np.interp(per_request, knots, ms) for knots, (_, ms) in zip(each, ends, strict=True)]
            ms = weights @ np.array(costs)
        return _Curve(rows, ms, self._draft_saves(places, weights), places, weights)

    def _draft_saves(self, places: NDArray[np.intp], weights: Floats) -> Floats:
        depths, draft_ms = self.table.depths, self.table.draft_ms
        if depths is None or draft_ms is None:
            return np.zeros(self.draft_length + 1)
        by_depth = _rising(weights @ draft_ms[places])
        passes = np.interp(np.arange(self.draft_length + 1), depths, by_depth)
        saves: Floats = passes[-1] - passes
        return saves

    def _captured_curve(self, place: int) -> tuple[Floats, Floats]:
        """Distinct budgets, ascending, and their milliseconds, made non-decreasing."""
        table, batch = self.table, self.table.batches[place]
        points: dict[int, list[float]] = {}
        for ratio, cost in zip(table.ratios, table.cost_ms[place].tolist(), strict=True):
            points.setdefault(budget(ratio, batch, self.draft_length + 1), []).append(cost)
        if batch not in points and table.plain_ms is not None and table.draft_ms is not None:
            points[batch] = [float(table.plain_ms[place] + table.draft_ms[place, -1])]
        rows = sorted(points)
        return np.array(rows, np.float64), _rising([float(np.mean(points[size])) for size in rows])


def _extended(curve: tuple[Floats, Floats], batch: int, draft_length: int) -> tuple[Floats, Floats]:
    """The curve from K = B, level below its first knot, to B * (D + 1), on along its overall slope."""
    rows, ms = curve
    if batch < rows[0]:
        rows, ms = np.insert(rows, 0, batch), np.insert(ms, 0, ms[0])
    most = batch * (draft_length + 1)
    if most > rows[-1]:
        slope = (ms[-1] - ms[0]) / (rows[-1] - rows[0]) if len(rows) > 1 else 0.0
        rows, ms = np.append(rows, most), np.append(ms, ms[-1] + slope * (most - rows[-1]))
    return rows, ms


def _rising(values: Sequence[float] | Floats) -> Floats:
    """The nearest non-decreasing sequence in least squares: neighbours in the wrong order become their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return np.array([mean for mean, count in pools for _ in range(count)])
