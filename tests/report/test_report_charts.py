"""Ticks, colours and sums behind the drawings."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_server.bench.confidence import Reliability, reliability
from dcut_server.report_page import charts
from dcut_server.report_page.documents import Confidence
from dcut_server.report_page.drafts import merged, recalibrates
from dcut_server.report_page.styles import COLOURS, DASHES, Style, styles

POSITIVE = st.floats(1e-3, 1e6)


@given(POSITIVE, POSITIVE)
def test_ticks_are_few_even_and_enclose_the_values(one, other):
    low, high = min(one, other), max(one, other)
    ticks = charts.nice_ticks(low, high)
    steps = [after - before for before, after in pairwise(ticks)]
    assert 2 <= len(ticks) <= charts.MOST_TICKS + 2
    assert ticks[0] <= low * (1 + 1e-6)
    assert ticks[-1] >= high * (1 - 1e-6)
    assert steps == pytest.approx([steps[0]] * len(steps))


@given(st.lists(st.tuples(st.integers(1, 512), POSITIVE, POSITIVE), min_size=1, max_size=6), st.booleans())
def test_every_mark_lies_within_its_plot(points, base):
    series = charts.Series("a", Style("red"), tuple((x, y, min(y, other), max(y, other)) for x, y, other in points))
    chart = charts.over_concurrency("title", "y", [series], base=base)
    left, top, right, bottom = chart.box
    for mark in chart.lines[0].marks:
        assert left <= mark.x <= right
        assert top - 1e-6 <= mark.y <= bottom + 1e-6
    assert (chart.level is not None) == base
    assert chart.level is None or top - 1e-6 <= chart.level <= bottom + 1e-6


def test_policies_can_be_told_apart():
    names = ["plain", "dflash", "dcut", "auto", "auto:-score", "oracle", "oracle-budget", "dspark", "smartspec"]
    names += [f"ratio:{number}" for number in range(4)] + ["tetris:8", "depth:3", "threshold:0.5", "dcut-vllm"]
    drawn = styles(names)
    assert set(drawn) == set(names)
    assert len({(style.colour, style.dash) for style in drawn.values()}) == len(names)
    assert len({drawn[f"ratio:{number}"].colour for number in range(4)}) == 1
    assert drawn["auto:-score"].colour == drawn["auto"].colour
    many = styles([f"kind-{number}" for number in range(len(COLOURS) * len(DASHES))])
    assert len({(style.colour, style.dash) for style in many.values()}) == len(many)


@given(st.lists(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=20), min_size=1, max_size=4))
def test_merged_bins_are_those_of_all_positions_together(groups):
    apart = [reliability(*arrays(group)) for group in groups]
    together = reliability(*arrays([pair for group in groups for pair in group]))
    found = merged([Reliability(part.predicted, part.accepted, part.count, part.ece, part.auroc) for part in apart])
    assert found.count == together.count
    assert found.ece == pytest.approx(together.ece)
    for name in ("predicted", "accepted"):
        for one, other in zip(getattr(found, name), getattr(together, name), strict=True):
            assert (one is None) == (other is None)
            assert one is None or one == pytest.approx(other)


def test_a_score_equal_to_the_product_but_for_rounding_is_no_recalibration():
    before = Reliability((0.2, 0.8), (0.2, 0.8), (500, 500), 0.0, 0.9)
    rounded = Reliability((0.2, 0.8), (0.2, 0.8), (501, 499), 0.0, 0.9)
    moved = Reliability((0.1, 0.9), (0.2, 0.8), (600, 400), 0.1, 0.9)
    assert not recalibrates(Confidence((1,), (1,), (1,), before, None))
    assert not recalibrates(Confidence((1,), (1,), (1,), before, rounded))
    assert recalibrates(Confidence((1,), (1,), (1,), before, moved))


def arrays(pairs):
    return np.array([said for said, _ in pairs]), np.array([seen for _, seen in pairs])
