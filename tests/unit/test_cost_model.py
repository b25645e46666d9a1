"""The cost model: what it says of steps that were measured, of those between, and how it learns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut_trt.spec.cost_model import CostModel
from dcut_trt.spec.cost_table import ContextCost, CostTable
from dcut_trt.spec.packing import budget

LENGTH = 7
RATIOS = (0.25, 0.5, 0.75, 1.0)
BATCHES = (1, 4, 16)
PLAIN = np.array([10.0, 14.0, 30.0])
DEPTHS = (1, 2, 4, 7)
DRAFT = np.array([[2.0, 2.2, 2.6, 3.2], [3.0, 3.5, 4.5, 6.0], [6.0, 8.0, 12.0, 18.0]])


def row_cost(batch: int, rows: float) -> float:
    """A drafting step is a straight line in K here, which meets plain decoding and a whole pass at K = B."""
    place = BATCHES.index(batch)
    return float(PLAIN[place] + DRAFT[place, -1] + 0.8 * (rows - batch))


def table(**changes: Any) -> CostTable:
    budgets = [[budget(ratio, batch, LENGTH + 1) for ratio in RATIOS] for batch in BATCHES]
    costs = [[row_cost(batch, rows) for rows in row] for batch, row in zip(BATCHES, budgets, strict=True)]
    fields: dict[str, Any] = {
        "batches": BATCHES,
        "ratios": RATIOS,
        "cost_ms": np.array(costs),
        "plain_ms": PLAIN,
        "fingerprint": "here",
        "measured_at": "now",
        "depths": DEPTHS,
        "draft_ms": DRAFT,
        "context_ms": ContextCost(plain=2.0, request=4.0, row=0.5),
        "context_rows": 150.0,
        "switch_ms": 2.5,
    }
    return CostTable(**fields | changes)


def at(model: CostModel, batch: int, rows: int, depth: int = LENGTH, context: float = 150.0) -> float:
    return float(model.step_ms(batch, np.array([rows]), depth, context)[0])


def test_measured_steps_cost_what_was_measured() -> None:
    model = CostModel(table(), LENGTH)
    for place, batch in enumerate(BATCHES):
        rows = np.array([budget(ratio, batch, LENGTH + 1) for ratio in RATIOS])
        np.testing.assert_allclose(model.step_ms(batch, rows, LENGTH, 150.0), model.table.cost_ms[place])
        assert model.plain_ms(batch, 150.0) == pytest.approx(PLAIN[place])


def test_the_cheapest_drafting_step_is_plain_decoding_and_the_drafters_pass() -> None:
    model = CostModel(table(), LENGTH)
    assert at(model, 4, 4) == pytest.approx(14 + 6)
    unknown = CostModel(table(depths=None, draft_ms=None), LENGTH)
    assert at(unknown, 4, 4) == at(unknown, 4, 8) == pytest.approx(row_cost(4, 8))  # level below the smallest ratio


def test_between_ratios_and_batch_sizes_there_are_straight_lines() -> None:
    model = CostModel(table(), LENGTH)
    assert at(model, 4, 13) == pytest.approx(row_cost(4, 13))
    half = (row_cost(4, 4 * 3) + row_cost(16, 16 * 3)) / 2  # three rows per request at both
    assert at(model, 10, 30) == pytest.approx(half)
    assert model.plain_ms(10, 150.0) == pytest.approx((14 + 30) / 2)


def test_beyond_the_largest_batch_the_rows_count() -> None:
    model = CostModel(table(), LENGTH)
    assert at(model, 20, 8 * 16) == pytest.approx(row_cost(16, 8 * 16))
    assert at(model, 20, 8 * 20) == pytest.approx(row_cost(16, 8 * 20))
    assert model.plain_ms(20, 150.0) == pytest.approx(30)


def test_a_shorter_block_saves_what_the_drafters_pass_saves() -> None:
    model = CostModel(table(), LENGTH)
    for place, depth in enumerate(DEPTHS):
        assert at(model, 4, 8) - at(model, 4, 8, depth) == pytest.approx(DRAFT[1, -1] - DRAFT[1, place])
    assert at(model, 4, 8, 3) == pytest.approx((at(model, 4, 8, 2) + at(model, 4, 8, 4)) / 2)


def test_a_longer_context_costs_by_request_and_by_row() -> None:
    model = CostModel(table(), LENGTH)
    assert at(model, 4, 8, context=1150) - at(model, 4, 8) == pytest.approx(4 * 4.0 + 8 * 0.5)
    assert model.plain_ms(4, 1150) - model.plain_ms(4, 150) == pytest.approx(4 * 2.0)
    assert at(model, 4, 8, context=0) < at(model, 4, 8)
    assert at(model, 4, 8, context=math.nan) == at(model, 4, 8)
    assert model.plain_ms(4, math.nan) == model.plain_ms(4, 150)


def test_a_context_far_below_the_profiled_one_makes_no_row_a_saving() -> None:
    dear = table(cost_ms=np.full((3, 4), 50.0), context_ms=ContextCost(0.0, 0.0, row=1.0), context_rows=500.0)
    costs = CostModel(dear, LENGTH).step_ms(4, np.arange(8, 33), LENGTH, 100.0)
    assert (np.diff(costs) >= 0).all()
    assert (costs > 0).all()


def test_an_old_table_knows_neither_depth_nor_context_nor_switches() -> None:
    bare = {"depths": None, "draft_ms": None, "context_ms": None, "context_rows": None, "switch_ms": None}
    model = CostModel(table(**bare), LENGTH)
    assert model.switch_ms == 0.0
    assert at(model, 4, 16, 1, 5000.0) == pytest.approx(row_cost(4, 16))


def test_what_was_not_measured_without_drafting_is_never_cheap() -> None:
    model = CostModel(table(plain_ms=None), LENGTH)
    assert model.plain_ms(4, 150.0) == math.inf
    assert at(model, 4, 16) == pytest.approx(row_cost(4, 16))


@pytest.mark.parametrize("batch", [1, 3, 8, 9])
def test_one_batch_size_and_one_ratio_are_enough(batch: int) -> None:
    tiny = CostTable((8,), (0.5,), np.array([[20.0]]), None, "here", "now")
    assert CostModel(tiny, LENGTH).step_ms(batch, np.arange(batch, batch * 8 + 1), 7, 0.0) == pytest.approx(20.0)


@st.composite
def noisy_tables(draw: st.DrawFn) -> CostTable:
    batches = tuple(sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=4))))
    ratios = tuple(draw(st.lists(st.sampled_from((0.1, 0.25, 0.5, 0.75, 1.0)), min_size=1, max_size=4, unique=True)))
    times = st.floats(0.01, 1000)

    def measured(*shape: int) -> np.ndarray:
        size = int(np.prod(shape))
        return np.array(draw(st.lists(times, min_size=size, max_size=size))).reshape(shape)

    depths = draw(st.sampled_from((None, (7,), (1, 2, 4, 7))))
    return CostTable(
        batches,
        ratios,
        measured(len(batches), len(ratios)),
        draw(st.sampled_from((None, 1))) and measured(len(batches)),
        "here",
        "now",
        depths=depths,
        draft_ms=None if depths is None else measured(len(batches), len(depths)),
        context_ms=draw(st.sampled_from((None, ContextCost(1.0, 2.0, 3.0), ContextCost(0.01, 0.02, 0.03)))),
        context_rows=draw(st.sampled_from((None, 0.0, 500.0))),
    )


CONTEXTS = st.sampled_from((0.0, 100.0, 9000.0, -1.0, math.nan, math.inf))


@settings(max_examples=150, deadline=None)
@given(noisy_tables(), st.integers(1, 50), st.integers(1, LENGTH), CONTEXTS)
def test_however_noisy_the_table_costs_are_positive_and_rise_with_rows_and_depth(
    noisy: CostTable, batch: int, depth: int, context: float
) -> None:
    model = CostModel(noisy, LENGTH)
    rows = np.arange(batch, batch * (LENGTH + 1) + 1)
    costs = model.step_ms(batch, rows, depth, context)
    assert np.isfinite(costs).all()
    assert (costs > 0).all()
    assert (np.diff(costs) >= 0).all()
    assert (costs <= model.step_ms(batch, rows, LENGTH, context)).all()
    assert model.plain_ms(batch, context) > 0
