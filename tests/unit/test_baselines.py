"""The rules of others equal their sources read aloud in loops, and none of them changes a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scripted_runs import expected, letters, letters_script, requests, run_all

from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import UnsupportedOption
from dcut_trt.spec.baselines import PROBE_EVERY, WARM_UP_DRAFTS, SmartSpec
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.packing import budget
from dcut_trt.spec.policies import check_policy_name, make_policy
from dcut_trt.spec.policy import NO_DRAFT, WHOLE_BLOCK, Policy
from dcut_trt.spec.selector import keep_depths, prefix_log_scores, rank
from dcut_trt.stage_types import BatchView, Draft, DraftTraits, Intent, Selection, StepOutcome
from dcut_trt.types import FloatArray, Request, SamplingParams

RATIOS = (0.25, 0.5, 0.75, 1.0)
LENGTH = 7
ANY = DraftTraits(LENGTH, any_budget=True, short_blocks=True)
BUCKETS = DraftTraits(LENGTH)
NAMES = ("dcut-vllm", "tetris:1", "tetris:9", "dspark", "smartspec", "threshold:0.6", "depth:1", "depth:4")

cost_rows = st.lists(st.floats(1, 50), min_size=4, max_size=4)
# Continuous, so that no two products are equal and every rule has one answer.
blocks = st.builds(
    lambda seed, batch, power: (np.random.default_rng(seed).random((batch, LENGTH)) ** power).astype(np.float32),
    st.integers(0, 2**32),
    st.integers(1, 9),
    st.sampled_from([0.05, 0.3, 1.0, 3.0]),
)
odd_blocks = st.integers(1, 5).flatmap(
    lambda batch: arrays(np.float32, (batch, LENGTH), elements=st.sampled_from([0.0, 0.5, 0.9, 1.0, math.nan]))
)


def table(*rows: Sequence[float], batches: tuple[int, ...] = (16,), plain: Sequence[float] | None = None) -> CostTable:
    return CostTable(batches, RATIOS, np.array(rows), None if plain is None else np.array(plain), "here", "now")


def view_of(batch: int) -> BatchView:
    names = tuple(f"r{row}" for row in range(batch))
    zeros = np.zeros(batch, np.int32)
    return BatchView(names, zeros, zeros, np.zeros(batch, np.float32))


def selected(policy: Policy, confidence: FloatArray) -> Selection:
    return policy.select(Draft(np.zeros(confidence.shape, np.int32), confidence), view_of(len(confidence)))


def kept(policy: Policy, confidence: FloatArray) -> list[int]:
    keep: list[int] = selected(policy, confidence).keep.tolist()
    return keep


def candidates(confidence: FloatArray) -> list[tuple[float, int, int]]:
    """(survival probability, row, depth) of every draft, best first."""
    found = []
    for row, line in enumerate(confidence.astype(np.float64).tolist()):
        survival = 1.0
        for depth, probability in enumerate(line, start=1):
            survival *= probability
            found.append((survival, row, depth))
    return sorted(found, key=lambda one: (-one[0], one[2], one[1]))


def lengths(chosen: list[tuple[float, int, int]], batch: int) -> list[int]:
    keep = [0] * batch
    for _, row, depth in chosen:
        assert depth == keep[row] + 1, "a hole in the prefix"
        keep[row] = depth
    return keep


@given(blocks, cost_rows)
def test_dcut_vllm_equals_trying_every_ratio(confidence: FloatArray, cost_ms: list[float]) -> None:
    batch = len(confidence)
    ranked = candidates(confidence)
    best, best_utility = 0, -1.0
    for ratio, cost in zip(RATIOS, cost_ms, strict=True):
        drafts = max(0, math.ceil(batch * (LENGTH + 1) * ratio) - batch)
        utility = sum(survival for survival, _, _ in ranked[:drafts]) / cost
        if utility > best_utility:
            best, best_utility = drafts, utility
    assert kept(make_policy("dcut-vllm", table(cost_ms)), confidence) == lengths(ranked[:best], batch)


def test_dcut_vllm_leaves_the_anchors_out_of_what_is_expected() -> None:
    """With them, 8 + 4 tokens in 10 ms are more per ms than 8 + 7 in 14; without them, 4 are fewer than 7."""
    confidence: FloatArray = np.full((8, LENGTH), 0.5, np.float32)
    costs = table((10.0, 14.0, 30.0, 40.0))
    assert selected(make_policy("dcut", costs), confidence).ratio == 0.25
    assert selected(make_policy("dcut-vllm", costs), confidence).ratio == 0.5


def test_dcut_vllm_reads_the_smallest_profiled_batch_that_holds_this_one() -> None:
    flat_then_steep = table((5.0, 5.0, 5.0, 5.0), (5.0, 50.0, 500.0, 5000.0), batches=(4, 8))
    policy = make_policy("dcut-vllm", flat_then_steep)
    sure: FloatArray = np.full((9, LENGTH), 0.9, np.float32)
    assert selected(policy, sure[:4]).ratio == 1.0
    assert selected(policy, sure[:5]).ratio == 0.25
    assert selected(policy, sure).ratio == 0.75


def test_dcut_vllm_gives_a_budget_without_drafts_no_score() -> None:
    costs = CostTable((1,), (0.125, 1.0), np.array([[0.001, 1000.0]]), None, "here", "now")
    assert kept(make_policy("dcut-vllm", costs), np.full((1, LENGTH), 0.1, np.float32)) == [LENGTH]
    assert kept(make_policy("dcut-vllm", costs), np.zeros((1, LENGTH), np.float32)) == [0]


@given(blocks, st.integers(1, 80))
def test_tetris_equals_the_top_of_a_sorted_list(confidence: FloatArray, capacity: int) -> None:
    policy = make_policy(f"tetris:{capacity}", None, BUCKETS)
    assert kept(policy, confidence) == lengths(candidates(confidence)[:capacity], len(confidence))


@given(blocks, st.integers(1, 80))
def test_a_device_can_follow_what_tetris_offers(confidence: FloatArray, capacity: int) -> None:
    batch = len(confidence)
    policy = make_policy(f"tetris:{capacity}", None, BUCKETS)
    offer = policy.offer(batch)
    assert offer is not None
    rows = budget(offer.ratios[0], batch, LENGTH + 1)
    keep = keep_depths(rank(prefix_log_scores(confidence)), rows, batch)
    selection = selected(policy, confidence)
    assert (selection.keep.tolist(), selection.ratio) == (keep.tolist(), offer.ratios[0])


def naive_cost(costs: CostTable, batch: int, rows: int) -> float:
    """Interpolated between the budgets of the ratios, constant outside them."""
    budgets = [budget(ratio, batch, LENGTH + 1) for ratio in RATIOS]
    points = list(zip(budgets, costs.cost_ms[0].tolist(), strict=True))
    if rows <= points[0][0]:
        return points[0][1]
    for (low, low_ms), (high, high_ms) in pairwise(points):
        if rows <= high:
            return low_ms + (high_ms - low_ms) * (rows - low) / (high - low)
    return points[-1][1]


@given(blocks, cost_rows)
def test_dspark_equals_its_algorithm_line_by_line(confidence: FloatArray, cost_ms: list[float]) -> None:
    costs, requests_ = table(sorted(cost_ms)), len(confidence)
    size, expected_tokens = requests_, float(requests_)
    best = requests_ / naive_cost(costs, requests_, requests_)
    chosen = []
    for survival, row, depth in candidates(confidence):
        size += 1
        expected_tokens += survival
        throughput = expected_tokens / naive_cost(costs, requests_, size)
        if not throughput > best:
            break
        best = throughput
        chosen.append((survival, row, depth))
    assert kept(make_policy("dspark", costs), confidence) == lengths(chosen, requests_)


def test_dspark_stops_at_the_first_fall_though_more_would_come() -> None:
    """A step of the costs between a quarter and a half of the rows; beyond it all is free."""
    cliff = table((10.0, 30.0, 30.0, 30.0))
    certain: FloatArray = np.full((1, LENGTH), 0.999, np.float32)
    assert kept(make_policy("dspark", cliff), certain) == [1]
    assert kept(make_policy("dcut", cliff), certain) == [LENGTH]


def test_dspark_never_admits_what_cannot_survive() -> None:
    cheaper_when_full = table((10.0, 8.0, 6.0, 4.0))
    confidence = np.array([[0.9, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]], np.float32)
    assert kept(make_policy("dspark", cheaper_when_full), confidence) == [1]


def test_dspark_knows_what_a_step_without_any_draft_costs() -> None:
    """Two rows cost 20 ms, one costs 4 + 1: a draft that is accepted half the time is not worth it."""
    measured = CostTable(
        (1,), RATIOS, np.array([[20.0, 21.0, 22.0, 23.0]]), np.array([4.0]), "here", "now",
        depths=(LENGTH,), draft_ms=np.array([[1.0]]),
    )  # fmt: skip
    half: FloatArray = np.full((1, LENGTH), 0.5, np.float32)
    assert kept(make_policy("dspark", measured), half) == [0]
    assert kept(make_policy("dspark", table((20.0, 21.0, 22.0, 23.0))), half) != [0]


@given(blocks, st.floats(0.01, 0.99))
def test_threshold_equals_looking_at_one_draft_after_the_other(confidence: FloatArray, threshold: float) -> None:
    keep = []
    for line in confidence.tolist():
        count = 0
        while count < LENGTH and line[count] >= threshold:
            count += 1
        keep.append(count)
    assert kept(make_policy(f"threshold:{threshold!r}", None), confidence) == keep


def test_threshold_asks_each_draft_and_not_the_product() -> None:
    assert kept(make_policy("threshold:0.6", None), np.full((1, LENGTH), 0.7, np.float32)) == [LENGTH]


def test_depth_drafts_short_blocks_where_they_can_be_had() -> None:
    short, whole = make_policy("depth:3", None, ANY), make_policy("depth:3", None, BUCKETS)
    assert short.intend(view_of(2)) == Intent(3)
    assert whole.intend(view_of(2)) == WHOLE_BLOCK
    assert kept(short, np.ones((2, 3), np.float32)) == kept(whole, np.ones((2, LENGTH), np.float32)) == [3, 3]


def outcome(policy: Policy, batch: int, keep: int, accepted: Sequence[int]) -> StepOutcome:
    intent = policy.intend(view_of(batch))
    verified, right = np.full(batch, keep, np.int32), np.array(accepted, np.int32)
    judged = np.minimum(verified, right + 1).astype(np.int32)
    return StepOutcome(view_of(batch), intent, None, None, verified, right, judged, batch * (keep + 1), 1.0, 1.0, 2.0)


def depth_of(policy: SmartSpec, batch: int) -> int:
    """Drafts that the next step verifies of each request."""
    intent = policy.intend(view_of(batch))
    if intent == NO_DRAFT:
        return 0
    length = LENGTH if intent.depth is None else intent.depth
    keep = kept(policy, np.ones((batch, length), np.float32))
    assert len(set(keep)) == 1
    return keep[0]


@given(st.lists(st.integers(0, LENGTH), min_size=1, max_size=6), cost_rows, st.integers(1, 9), st.floats(0.5, 30))
def test_smartspec_equals_trying_every_depth(right: list[int], cost_ms: list[float], batch: int, plain: float) -> None:
    policy = make_policy("smartspec", table(cost_ms, plain=[plain]), BUCKETS)
    assert isinstance(policy, SmartSpec)
    assert depth_of(policy, batch) == LENGTH
    accepted = judged = 0.0
    for count in right:
        policy.observe(outcome(policy, batch, LENGTH, [count] * batch))
        accepted = 0.9 * accepted + batch * count
        judged = 0.9 * judged + batch * min(LENGTH, count + 1)
    if sum(batch * min(LENGTH, count + 1) for count in right) < WARM_UP_DRAFTS:
        assert depth_of(policy, batch) == LENGTH
        return
    rate = accepted / judged
    assert policy.acceptance == pytest.approx(rate)
    costs = table(cost_ms)
    goodput = [batch / plain]
    for depth in range(1, LENGTH + 1):
        tokens = depth + 1 if rate == 1 else (1 - rate ** (depth + 1)) / (1 - rate)
        goodput.append(batch * tokens / naive_cost(costs, batch, batch * (depth + 1)))
    assert goodput[depth_of(policy, batch)] == pytest.approx(max(goodput))


def test_smartspec_stops_drafting_and_looks_again_now_and_then() -> None:
    policy = make_policy("smartspec", table((20.0, 30.0, 40.0, 50.0), plain=[15.0]), ANY)
    assert isinstance(policy, SmartSpec)
    for _ in range(WARM_UP_DRAFTS // 4):
        policy.observe(outcome(policy, 4, LENGTH, [0] * 4))
    depths = [depth_of(policy, 4) for _ in range(3 * (PROBE_EVERY + 1))]
    assert sum(depths) == 3
    assert np.diff(np.flatnonzero(depths)).tolist() == [PROBE_EVERY + 1] * 2
    for _ in range(40):
        policy.observe(outcome(policy, 4, 1, [1] * 4))
    assert depth_of(policy, 4) > 1


def test_smartspec_always_drafts_where_the_cost_of_a_plain_step_is_not_known() -> None:
    policy = make_policy("smartspec", table((20.0, 30.0, 40.0, 50.0)), BUCKETS)
    assert isinstance(policy, SmartSpec)
    for _ in range(WARM_UP_DRAFTS // 4):
        policy.observe(outcome(policy, 4, LENGTH, [0] * 4))
    assert depth_of(policy, 4) == 1


def test_smartspec_counts_a_shorter_block_as_cheaper() -> None:
    costs = CostTable(
        (4,), RATIOS, np.array([[20.0, 20.5, 21.0, 21.5]]), None, "here", "now",
        depths=(1, LENGTH), draft_ms=np.array([[1.0, 15.0]]),
    )  # fmt: skip
    short, whole = (make_policy("smartspec", costs, traits) for traits in (ANY, BUCKETS))
    assert isinstance(short, SmartSpec)
    assert isinstance(whole, SmartSpec)
    for policy in (short, whole):
        for _ in range(WARM_UP_DRAFTS // 8):
            policy.observe(outcome(policy, 4, LENGTH, [1] * 4))
    assert depth_of(short, 4) < depth_of(whole, 4)


@pytest.mark.parametrize("name", NAMES)
@given(confidence=odd_blocks)
def test_missing_and_impossible_confidences_count_as_none(name: str, confidence: FloatArray) -> None:
    costs = table((5.0, 6.0, 7.0, 8.0), plain=[4.0])
    keep = kept(make_policy(name, costs, BUCKETS), confidence)
    assert keep == kept(make_policy(name, costs, BUCKETS), np.nan_to_num(confidence))
    assert all(0 <= count <= LENGTH for count in keep)
    if name in ("dspark", "threshold:0.6"):
        certain = [line.index(0) if 0 in line else LENGTH for line in np.nan_to_num(confidence).tolist()]
        assert all(count <= limit for count, limit in zip(keep, certain, strict=True))


@settings(max_examples=12)
@given(
    st.sampled_from(NAMES),
    st.floats(0.0, 1.0),
    st.integers(1, 6),
    st.sampled_from([(5.0, 5.5, 6.0, 6.5), (5.0, 15.0, 25.0, 35.0)]),
)
def test_no_token_differs_from_plain(name: str, accuracy: float, number: int, cost_ms: tuple[float, ...]) -> None:
    script = letters_script()
    policy = make_policy(name, table(cost_ms, batches=(4,), plain=[4.5]), ANY)
    engine = scripted_engine(policy, script=script, accuracy=accuracy, max_batch=4)
    crowd = [*requests(number), Request("sampled", letters("drawn"), 30, SamplingParams(1.0, seed=3))]
    streams = run_all(engine, *crowd)
    for request in crowd:
        assert streams[request.request_id].outcome == expected(script, request)


@pytest.mark.parametrize("name", [*NAMES, "threshold:0.25"])
def test_a_policy_carries_the_name_it_was_made_by(name: str) -> None:
    check_policy_name(name)
    assert make_policy(name, table((5.0, 6.0, 7.0, 8.0)), ANY).name == name


@pytest.mark.parametrize(
    "name",
    [
        *("tetris", "tetris:", "tetris:0", "tetris:-1", "tetris:1.5", "tetris:x", "tetris:²"),
        *("threshold", "threshold:0", "threshold:1", "threshold:nan", "threshold:x"),
        *("depth", "depth:0", "depth:1.0", "depth:-3", "dspark:1", "smartspec:", "dcut-vllm:0.5"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_with_what_is_offered(name: str) -> None:
    with pytest.raises(UnsupportedOption, match=r"tetris:C .*, dspark, smartspec, threshold:T .*, depth:N"):
        check_policy_name(name)


@pytest.mark.parametrize("name", ["dcut-vllm", "dspark", "smartspec"])
def test_rules_that_read_costs_need_a_table(name: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"'{name}': needs a cost table"):
        make_policy(name, None, ANY)


def test_a_depth_beyond_the_drafters_is_refused() -> None:
    assert make_policy("depth:7", None, ANY).name == "depth:7"
    with pytest.raises(UnsupportedOption, match="depth:8': the drafter drafts 7 tokens"):
        make_policy("depth:8", None, ANY)
