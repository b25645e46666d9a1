"""The plugin's contract against the selector and packing that serve on CPU, and the rule for comparing twins."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gpu.pack_cases import BAD_COSTS, RATIOS, SHAPES, exact_cases, make_case, random_case, ratio_budgets
from policy_inputs import selected

from dcut_plugins.confidence_topk_pack.contract import MAX_BUDGETS, MAX_POSITIONS, OUTPUTS, PackInputs, check_limits
from dcut_plugins.confidence_topk_pack.reference import NEAR_TIE, confidence_topk_pack, disagreement
from dcut_trt.errors import UnsupportedOption
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.packing import pack
from dcut_trt.spec.rules import DCut
from dcut_trt.types import FloatArray


def confidences(rng: np.random.Generator) -> FloatArray:
    return random_case(rng).confidence


def test_it_is_the_dcut_policy_followed_by_packing() -> None:
    rng = np.random.default_rng(3)
    for _ in range(500):
        confidence = confidences(rng)
        batch, length = confidence.shape
        costs = rng.uniform(1, 9, 4).astype(np.float32)
        table = CostTable((batch,), RATIOS, costs[None].astype(np.float64), np.ones(1), "here", "now")
        inputs = make_case(confidence, ratio_budgets(batch, length), costs)
        got = confidence_topk_pack(inputs)

        selection = selected(DCut(table), confidence)
        plan = pack(inputs.anchors, inputs.tokens, selection.keep)
        assert RATIOS[got.bucket[0]] == selection.ratio
        np.testing.assert_array_equal(got.keep, selection.keep)
        np.testing.assert_array_equal(got.subsequence_begins, plan.cu_lens)
        for name in ("token_ids", "request_rows", "depths"):
            np.testing.assert_array_equal(getattr(got, name)[: plan.size], getattr(plan, name))
        positions = inputs.anchor_positions[plan.request_rows] + plan.depths
        np.testing.assert_array_equal(got.positions[: plan.size], positions)


@pytest.mark.parametrize("bypass", [1, -7])
def test_a_bypassed_step_keeps_the_anchors_alone(bypass: int) -> None:
    inputs = make_case(np.ones((3, 2), np.float32), ratio_budgets(3, 2), np.ones(4, np.float32), bypass=bypass)
    got = confidence_topk_pack(inputs)
    assert got.bucket.tolist() == [4]
    assert got.keep.tolist() == [0, 0, 0]
    assert got.subsequence_begins.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(got.token_ids[:3], inputs.anchors)
    np.testing.assert_array_equal(got.positions[:3], inputs.anchor_positions)


def test_rows_past_the_kept_ones_are_zero() -> None:
    got = confidence_topk_pack(
        make_case(np.full((4, 3), 0.1, np.float32), ratio_budgets(4, 3), np.array([1, 9, 9, 9], np.float32))
    )
    assert got.subsequence_begins[-1] == 4
    for name in ("token_ids", "request_rows", "depths", "positions"):
        assert (getattr(got, name)[:4] != 0).any() or name == "depths"
        assert (getattr(got, name)[4:] == 0).all()


def bucket(costs: list[float], budgets: list[int] | None = None) -> int:
    """Chosen for two requests with one certain and one hopeless draft each."""
    confidence = np.array([[1, 0], [1, 0]], np.float32)
    numbers = ratio_budgets(2, 2) if budgets is None else np.array(budgets, np.int32)
    return int(confidence_topk_pack(make_case(confidence, numbers, np.array(costs, np.float32))).bucket[0])


def test_a_bucket_whose_cost_is_not_positive_and_finite_is_never_chosen() -> None:
    assert bucket([2, 2, 8, 8], [2, 4, 4, 6]) == 1
    for bad in BAD_COSTS.tolist():
        assert bucket([2, bad, 8, 8], [2, 4, 4, 6]) == 0
        assert bucket([bad, bad, 8, 8], [2, 4, 4, 6]) == 2


def test_without_any_usable_cost_everything_is_verified() -> None:
    assert bucket([0, -1, np.nan, np.inf]) == 3


def test_the_first_of_equally_good_buckets_is_chosen() -> None:
    assert bucket([5, 2, 2, 2], [2, 4, 5, 6]) == 1


def test_budgets_out_of_range_count_as_the_nearer_end() -> None:
    confidence = np.full((2, 2), 0.5, np.float32)
    for given, rows in ((-9, 2), (1, 2), (3, 3), (1 << 30, 6)):
        got = confidence_topk_pack(make_case(confidence, np.array([given], np.int32), np.ones(1, np.float32)))
        assert got.subsequence_begins[-1] == rows


def test_the_rule_accepts_the_reference_and_no_other_integer() -> None:
    rng = np.random.default_rng(4)
    for inputs in (*(random_case(rng) for _ in range(100)), *(inputs for _, inputs in exact_cases())):
        right = confidence_topk_pack(inputs)
        assert disagreement(inputs, right) is None
        for name in OUTPUTS:
            wrong = getattr(right, name).copy()
            wrong[rng.integers(len(wrong))] += rng.choice([-1, 1]) if name != "bucket" else -99
            assert disagreement(inputs, dataclasses.replace(right, **{name: wrong})) is not None, name


def near_tie(difference: float) -> PackInputs:
    """One draft each of two requests for one free row; the second is better by a relative difference."""
    confidence = np.array([[0.5], [0.5 * (1 + difference)]], np.float32)
    return make_case(confidence, np.array([3], np.int32), np.ones(1, np.float32))


def test_the_rule_allows_the_other_side_of_a_near_tie_only() -> None:
    first_wins = confidence_topk_pack(near_tie(-0.5))
    assert first_wins.keep.tolist() == [1, 0]
    for difference, agrees in ((NEAR_TIE / 2, True), (NEAR_TIE * 4, False)):
        inputs = near_tie(difference)
        assert confidence_topk_pack(inputs).keep.tolist() == [0, 1]
        assert (disagreement(inputs, first_wins) is None) == agrees


def test_limits() -> None:
    for batch, length in SHAPES:
        check_limits(batch, length, 4)
    check_limits(MAX_POSITIONS // 16, 15, MAX_BUDGETS)
    for batch, length, budgets in ((257, 15, 4), (0, 7, 4), (4, 0, 4), (4, 7, 0), (4, 7, MAX_BUDGETS + 1)):
        with pytest.raises(UnsupportedOption, match="must be in"):
            check_limits(batch, length, budgets)
