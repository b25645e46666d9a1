"""Scores, ranking and the choice of a ratio, against naive twins; the paper's tables as examples."""

from __future__ import annotations

import heapq
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dcut_trt.spec.packing import budget
from dcut_trt.spec.selector import choose_ratio, keep_depths, prefix_log_scores, rank
from dcut_trt.types import FloatArray

PAPER = json.loads((Path(__file__).parents[1] / "fixtures" / "paper_cost_tables.json").read_text(encoding="utf-8"))
RATIOS = tuple(PAPER["ratios"])

# A few values many times over, so that ties, certain drafts and hopeless drafts meet in one block.
AWKWARD = st.sampled_from([0.0, 1.0, 0.5, 0.5, 0.25, 1e-45, 1.1754944e-38, 1 - 2**-24, math.nan])
ANY = st.floats(0, 1, width=32)
SHAPES = st.tuples(st.integers(1, 8), st.integers(1, 9))
blocks = SHAPES.flatmap(lambda shape: arrays(np.float32, shape, elements=AWKWARD | ANY))
costs = st.lists(st.floats(0.1, 100), min_size=len(RATIOS), max_size=len(RATIOS))


def naive_log_scores(confidence: FloatArray) -> list[list[float]]:
    """One row per request: 0 for the anchor, then the running sum of logarithms, in float32 as the machine has it."""
    scores = []
    for row in confidence:
        line = [np.float32(0)]
        for value in row:
            log = np.float32(-np.inf) if not value > 0 else np.log(value)
            line.append(np.float32(line[-1] + log))
        scores.append([float(score) for score in line])
    return scores


@given(blocks)
def test_scores_are_running_sums_that_never_rise(confidence: FloatArray) -> None:
    scores = prefix_log_scores(confidence)
    np.testing.assert_allclose(scores, naive_log_scores(confidence), rtol=1e-6)
    assert (scores[:, 0] == 0).all()
    assert (scores[:, 1:] <= scores[:, :-1]).all()


def test_products_below_the_smallest_float_stay_apart() -> None:
    scores = prefix_log_scores(np.full((1, 15), 1e-30, np.float32))
    assert (np.diff(scores) < 0).all()
    assert np.isfinite(scores).all()


@given(blocks)
def test_ranking_equals_sorting_by_score_then_depth_then_row(confidence: FloatArray) -> None:
    scores = prefix_log_scores(confidence)
    batch, block = scores.shape
    ordered = sorted(
        ((depth, row) for depth in range(block) for row in range(batch)),
        key=lambda place: (-scores[place[1], place[0]], *place),
    )
    assert rank(scores).tolist() == [depth * batch + row for depth, row in ordered]


@given(blocks)
def test_every_leading_part_is_a_prefix_of_each_request_and_sums_to_its_size(confidence: FloatArray) -> None:
    scores = prefix_log_scores(confidence)
    batch, block = scores.shape
    ranked = rank(scores)
    for size in range(batch, batch * block + 1):
        keep = keep_depths(ranked, size, batch)
        best = {(int(index) % batch, int(index) // batch) for index in ranked[:size]}
        assert best == {(row, depth) for row in range(batch) for depth in range(keep[row] + 1)}
        assert keep.min() >= 0
        assert (keep + 1).sum() == size


@given(blocks, st.sampled_from(RATIOS))
def test_what_is_kept_is_the_likeliest_set_of_its_size(confidence: FloatArray, ratio: float) -> None:
    scores = prefix_log_scores(confidence)
    batch, block = scores.shape
    size = budget(ratio, batch, block)
    keep = keep_depths(rank(scores), size, batch)
    kept = sum(math.exp(scores[row, depth]) for row in range(batch) for depth in range(keep[row] + 1))
    assert kept == pytest.approx(sum(heapq.nlargest(size, np.exp(scores).ravel().tolist())), rel=1e-5)


@given(blocks, costs)
def test_choose_ratio_equals_trying_every_ratio(confidence: FloatArray, cost_ms: list[float]) -> None:
    scores = prefix_log_scores(confidence)
    chosen = choose_ratio(scores, rank(scores), RATIOS, np.array(cost_ms))
    likely = [math.exp(score) for score in scores.ravel()]
    tried = [
        sum(heapq.nlargest(budget(ratio, *scores.shape), likely)) / cost
        for ratio, cost in zip(RATIOS, cost_ms, strict=True)
    ]
    assert tried[chosen] == pytest.approx(max(tried), rel=1e-6)


def test_a_poisoned_row_is_pruned_and_the_others_are_not() -> None:
    confidence = np.full((3, 4), 0.9, np.float32)
    confidence[1] = np.nan
    scores = prefix_log_scores(confidence)
    assert keep_depths(rank(scores), 11, 3).tolist() == [4, 0, 4]


def choice(device: str, batch: int, confidence: float) -> float:
    """The ratio that a device's table in the paper gives for equal confidence everywhere."""
    block: FloatArray = np.full((batch, PAPER["draft_length"]), confidence, np.float32)
    scores = prefix_log_scores(block)
    cost_ms = np.array(PAPER["cost_ms"][device][PAPER["batches"].index(batch)])
    return float(RATIOS[choose_ratio(scores, rank(scores), RATIOS, cost_ms)])


@pytest.mark.parametrize(
    ("device", "batch", "confidence", "ratio"),
    [
        # Expected tokens of 4, 8, 12, 16 rows at 0.99: 3.94 7.73 11.36 14.85; H800's row at 8 is nearly flat.
        ("H800", 8, 0.99, 1.0),
        # The same row at 0.9: 3.44 5.70 7.18 8.15; 8.15 / 8.628 = 0.944 is still the best.
        ("H800", 8, 0.9, 1.0),
        # At 0.5: 1.875 1.992 2.000 2.000; 1.992 / 8.457 = 0.2356 beats 0.2242 at a quarter and 0.2318 at all.
        ("H800", 8, 0.5, 0.5),
        # H20's row at 64 is steep: 5.70 / 82.287 = 0.0692 is the best, 8.15 / 133.914 = 0.0608 the worst.
        ("H20", 64, 0.9, 0.5),
        # At 0.5 everything past a quarter is waste there.
        ("H20", 64, 0.5, 0.25),
        # Alone, H20 is flat: 2.000 / 7.353 against 1.992 / 7.157.
        ("H20", 1, 0.5, 0.5),
        ("H20", 1, 0.9, 1.0),
    ],
)
def test_hand_checked_choices_from_the_papers_tables(device: str, batch: int, confidence: float, ratio: float) -> None:
    assert choice(device, batch, confidence) == ratio


@pytest.mark.parametrize("batch", PAPER["batches"])
@pytest.mark.parametrize("confidence", [0.3, 0.5, 0.7, 0.9])
def test_the_steeper_device_never_verifies_more(batch: int, confidence: float) -> None:
    assert choice("H20", batch, confidence) <= choice("H800", batch, confidence)
