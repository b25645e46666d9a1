"""What the default rule is made of: replayed blocks, the choice between arms, probes, and what arms cost."""

from __future__ import annotations

import numpy as np
import pytest

from dcut_trt.spec.arm_costs import ArmTimes, FeedCost
from dcut_trt.spec.arms import BYPASS, ArmChoice, Arms, ProbeSchedule
from dcut_trt.spec.load import Load
from dcut_trt.spec.replay import RecentBlocks, prospect
from dcut_trt.spec.selector import prefix_log_scores
from dcut_trt.stage_types import BatchView


def test_replayed_blocks_give_the_rate_of_the_best_choices() -> None:
    draws = np.random.default_rng(1)
    log_scores = prefix_log_scores(draws.random((12, 3)).astype(np.float32))
    blocks = np.exp(log_scores)
    recent = RecentBlocks(3)
    recent.add(log_scores, np.zeros(12, np.float32))
    batches = recent.batches(4, 0, latest=12)
    sizes = np.arange(4, 13, dtype=np.int32)
    cost_ms = 5.0 + 0.9 * sizes
    pooled = [np.sort(blocks[first : first + 4, :3].ravel())[::-1].cumsum() for first in (0, 4, 8)]

    def rate(chosen: list[int]) -> float:
        gained = sum(expected[size - 1] for expected, size in zip(pooled, chosen, strict=True))
        return float(gained / sum(cost_ms[size - 4] for size in chosen))

    each = [max(sizes.tolist(), key=lambda size: expected[size - 1] / cost_ms[size - 4]) for expected in pooled]
    found = prospect(batches, 2, sizes, cost_ms, 0.0)
    assert found.rate == pytest.approx(rate(each))

    steady = [rate([size] * 3) for size in sizes.tolist()]
    assert found.size == 4 + int(np.argmax(steady))
    switching = prospect(batches, 2, sizes, cost_ms, 100.0)
    assert (switching.rate, switching.size) == (pytest.approx(max(steady)), found.size)


def test_a_short_block_goes_on_as_blocks_did() -> None:
    recent = RecentBlocks(3, window=2)
    greedy = np.zeros(1, np.float32)
    recent.add(np.log(np.array([[1, 0.5]], np.float32)), greedy)
    assert recent.known(sampled=False) == 0
    recent.add(np.log(np.array([[1, 0.8, 0.4, 0.2]], np.float32)), greedy)
    recent.add(np.log(np.array([[1, 0.4]], np.float32)), greedy)
    found = prospect(recent.batches(1, 0, latest=1), 3, np.array([4], np.int32), np.array([1.0]), 0.0)
    assert found.rate == pytest.approx(1 + 0.4 + 0.2 + 0.1)


def test_a_batch_is_foreseen_from_blocks_of_its_own_kinds() -> None:
    recent, size, ms = RecentBlocks(1), np.array([8], np.int32), np.array([1.0])

    def expected(sampled: int) -> float:
        return prospect(recent.batches(4, sampled, latest=16), 1, size, ms, 0.0).rate / 4 - 1

    recent.add(np.log(np.full((6, 2), [1, 0.8], np.float32)), np.zeros(6, np.float32))
    assert expected(4) == pytest.approx(0.8)  # nobody knows sampled ones yet
    recent.add(np.log(np.full((6, 2), [[1, 0.2]], np.float32)), np.ones(6, np.float32))
    mixed = np.array([0, 1, 0], np.float32)
    recent.add(np.log(np.array([[1, 0.8], [1, 0.2], [1, 0.8]], np.float32)), mixed)
    assert (recent.known(sampled=False), recent.known(sampled=True)) == (8, 7)
    assert [expected(sampled) for sampled in range(5)] == pytest.approx([0.8, 0.65, 0.5, 0.35, 0.2])


def test_a_small_lead_must_last_and_a_clear_one_need_not() -> None:
    choice = ArmChoice()
    for rates, first in (({0: 1.0, 7: 0.9}, 0), ({0: 1.0, 7: 1.1}, 7), ({0: 1.1, 7: 1.0}, 0)):
        choice.weigh(rates)
        assert choice.current == first
    for rates in ({0: 1.0, 7: 1.1}, {0: 1.0, 7: 1.1}, {0: 1.0, 7: 1.01}, {0: 1.0, 7: 1.1}, {0: 1.0, 7: 1.1}):
        choice.weigh(rates)
        assert choice.current == 0
    choice.weigh({0: 1.0, 7: 1.1})
    assert choice.current == 7
    choice.weigh({0: 1.3, 7: 1.1})
    assert choice.current == 0


def test_probes_stop_when_they_have_cost_their_share() -> None:
    schedule = ProbeSchedule()
    schedule.passed(1e9)  # an hour without probes pays for none later
    schedule.probed(1000.0)
    schedule.passed(180_000.0)
    assert not any(schedule.due(Load(8)) for _ in range(600))
    schedule.passed(12_000.0)
    assert schedule.due(Load(8))


def test_a_load_that_returns_is_not_probed_as_if_it_were_new() -> None:
    schedule = ProbeSchedule()
    schedule.passed(1e9)
    waited = []
    for batch in (8, 8, 2, 8):
        waited.append(next(steps for steps in range(1, 1000) if schedule.due(Load(batch))))
        schedule.probed(1.0)
        schedule.answered(draft=False)
    assert waited == [64, 128, 64, 256]


def test_arms_are_told_apart_from_the_machine() -> None:
    times, draws = ArmTimes(), np.random.default_rng(0)
    assert times.plain_factor(Load(8)) == 1
    for step in range(1200):
        slower = 1 + step / 600  # the machine gets three times as slow
        drafting = step % 64 >= 4
        took = slower * (20.0 if drafting else 9.0) * float(np.exp(0.05 * draws.normal()))
        times.learn(Load(8), took, 20.0 if drafting else 10.0, drafting=drafting)
    assert times.plain_factor(Load(15)) == pytest.approx(0.9, rel=0.03)
    assert times.plain_factor(Load(16)) == times.plain_factor(Load(8, sampled=True)) == 1
    before = times.plain_factor(Load(8))
    for drafting in (False, False, True):
        times.learn(Load(8), 1e5, 10.0, drafting=drafting)
    assert times.plain_factor(Load(8)) < 1.03 * before


def test_another_load_is_noticed_once_by_the_arm_in_use() -> None:
    times = ArmTimes()
    for _ in range(50):
        times.learn(Load(4), 20.0, 20.0, drafting=True)
    assert not times.shifted(Load(4))
    for _ in range(50):
        times.learn(Load(4), 23.0, 20.0, drafting=True)
    assert times.shifted(Load(4))
    assert not times.shifted(Load(4))
    assert not times.shifted(Load(64))


def test_plain_decoding_is_tried_soon_after_a_doubt() -> None:
    arms, tried = Arms(7), []
    for step in range(400):
        if step == 200:
            arms.doubt(Load(4))
        if arms.must_compare(Load(4)):
            arms.compare(Load(4), {7: 1.0, BYPASS: 0.95})
        arm = arms.next(Load(4))
        if arm == BYPASS and (not tried or step > tried[-1] + 6):
            tried.append(step)
        arms.passed(Load(4), 20.0, 18.0, drafted=arm != BYPASS)
    between = [step for step in tried if 150 < step < 300]
    assert between
    assert between[0] <= 210


def test_the_price_of_waiting_features_is_found() -> None:
    draws, feed = np.random.default_rng(0), FeedCost()
    assert feed(100) == 0
    for _ in range(100):
        rows, pending = int(draws.integers(2, 256)), int(draws.integers(0, 3000))
        feed.learn(rows, pending, 1.5 + 0.05 * rows + 0.02 * pending + draws.normal() * 0.1)
    assert feed(1000) == pytest.approx(20.0, rel=0.05)


def test_prompts_are_part_of_what_drafting_costs() -> None:
    draws, feed = np.random.default_rng(0), FeedCost()
    for step in range(300):
        names = tuple(f"r{step // 25}-{row}" for row in range(4))  # all four leave after 25 steps
        pending = np.full(4, 100 if step % 25 == 0 else 2, np.int32)
        feed.learn(32, int(pending.sum()), 1.5 + 0.02 * int(pending.sum()) + draws.normal() * 0.05)
        feed.meet(BatchView(names, pending, pending, np.zeros(4, np.float32)), tokens=8)
    assert feed.prompts_ms() == pytest.approx(0.02 * 400 / (25 * 8), rel=0.15)
