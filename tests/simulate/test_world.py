"""The simulated world: against a plain twin, against closed forms, and what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from naive_world import naive_run
from small_traces import LENGTH, linear_costs, small_trace

from dcut_server.simulate.costs import Costs, load_costs
from dcut_server.simulate.lab import Run, simulate
from dcut_server.simulate.paper import paper_trace
from dcut_server.simulate.traces import Trace
from dcut_server.simulate.world import SimulationError, World
from dcut_trt.errors import UnsupportedOption
from dcut_trt.spec.cost_model import CostModel
from dcut_trt.spec.policies import make_policy
from dcut_trt.spec.policy import NO_DRAFT, Steady
from dcut_trt.stage_types import BatchView, Draft, DraftTraits, Intent, Offer, Selection, StepOutcome

ANY = DraftTraits(LENGTH, any_budget=True)


def world_of(trace: Trace, costs: Costs, batch: int, traits: DraftTraits = ANY, *, paired: bool = False) -> World:
    return World(trace, CostModel(costs.table, LENGTH), batch, traits, paired=paired)


@pytest.mark.parametrize("name", ["dflash", "ratio:0.3", "ratio:0.5", "dcut"])
@pytest.mark.parametrize("batch", [4, 8])
def test_world_equals_serving_one_request_at_a_time(name: str, batch: int) -> None:
    trace, costs = small_trace(), linear_costs(plain=False)
    world = world_of(trace, costs, batch)
    starts = world.places.tolist()
    assert len(set(starts)) == batch
    policy = make_policy(name, costs.table, ANY)
    expected = naive_run(trace, costs.table, batch, policy, 120, starts)
    totals = world.run(policy, 120)
    assert (totals.tokens, totals.rows) == (expected["tokens"], expected["rows"])
    assert totals.ms == pytest.approx(expected["ms"])


def test_dflash_makes_its_mean_accepted_tokens_in_the_time_of_whole_blocks() -> None:
    trace = paper_trace("gsm8k")
    (cell,) = simulate(trace, load_costs("h20"), 32, ["dflash"], Run(steps=300, paired=True))
    assert cell.totals.ms == pytest.approx(300 * 70.066)
    assert cell.totals.tokens_per_step == pytest.approx(6.10, rel=0.03)
    assert cell.totals.tokens_per_s == pytest.approx(1e3 * 32 * 6.10 / 70.066, rel=0.03)


def test_plain_decoding_makes_one_token_a_step() -> None:
    (cell,) = simulate(small_trace(), linear_costs(), 8, ["plain"], Run(steps=50))
    assert cell.totals.tokens == cell.totals.rows == 50 * 8
    assert cell.totals.ms == pytest.approx(50 * (5 + 0.5 * 8))
    assert cell.totals.blocks == 0


def test_paired_worlds_show_every_policy_the_same_blocks() -> None:
    trace, costs = small_trace(), linear_costs()
    seen = []
    for name in ("dflash", "ratio:0.25"):
        world = world_of(trace, costs, 8, paired=True)
        policy = make_policy(name, costs.table, ANY)
        seen.append([world.step(policy).draft for _ in range(40)])
    for whole, pruned in zip(*seen, strict=True):
        np.testing.assert_array_equal(whole.confidence, pruned.confidence)


def test_a_target_of_fixed_shapes_pays_for_the_next_bucket() -> None:
    class Odd(Steady):
        name = "odd"

        def select(self, draft: Draft, view: BatchView) -> Selection:
            return Selection(np.array([3, 3, 0, 0], np.int32), None)

        def offer(self, batch: int) -> Offer | None:
            return None

    trace, costs = small_trace(), linear_costs()  # buckets of 4 requests: 8, 16, 24 and 32 rows
    fixed = world_of(trace, costs, 4, DraftTraits(LENGTH)).step(Odd())
    any_size = world_of(trace, costs, 4).step(Odd())
    assert (fixed.rows, any_size.rows) == (10, 10)
    assert fixed.step_ms == pytest.approx(10 + 0.5 * 16)
    assert any_size.step_ms == pytest.approx(10 + 0.5 * 10)


class Some(Steady):
    """Some requests draft, not as deep as they might."""

    name = "some"

    def __init__(self, depth: int | None, rows: list[int] | None) -> None:
        self.intent = Intent(depth, None if rows is None else np.array(rows, np.int32))

    def intend(self, view: BatchView) -> Intent:
        return self.intent

    def select(self, draft: Draft, view: BatchView) -> Selection:
        return Selection(np.full(len(draft.confidence), draft.confidence.shape[1], np.int32), None)

    def offer(self, batch: int) -> Offer | None:
        return None


def test_who_does_not_draft_gets_one_token_and_keeps_its_features() -> None:
    trace = small_trace()
    world = world_of(trace, linear_costs(), 4)
    before = world.pending.copy()
    outcome = world.step(Some(None, [1, 3]))
    assert outcome.keep.tolist() == [0, LENGTH, 0, LENGTH]
    assert outcome.accepted[[0, 2]].tolist() == [0, 0]
    assert world.pending[[0, 2]].tolist() == (before[[0, 2]] + 1).tolist()
    assert world.pending[[1, 3]].tolist() == (outcome.accepted[[1, 3]] + 1).tolist()


def test_short_blocks_and_fewer_drafters_save_what_the_drafter_was_profiled_at() -> None:
    trace, costs = small_trace(), linear_costs(draft_depths=(2, 4, LENGTH))  # sqrt(batch) * depth / 4 milliseconds
    traits = DraftTraits(LENGTH, any_budget=True, short_blocks=True)
    model = CostModel(costs.table, LENGTH)
    short = world_of(trace, costs, 4, traits).step(Some(2, None))
    assert short.draft_ms == pytest.approx(2 * 2 / 4)
    assert short.step_ms == pytest.approx(float(model.step_ms(4, np.array([12]), 2, np.nan)[0]))
    whole = world_of(trace, costs, 16, traits).step(Some(None, None))
    few = world_of(trace, costs, 16, traits).step(Some(None, [0, 1, 2, 3]))
    assert whole.draft_ms - few.draft_ms == pytest.approx((4 - 2) * LENGTH / 4)
    all_ms = float(model.step_ms(16, np.array([few.rows]), LENGTH, np.nan)[0])
    assert all_ms - few.step_ms == pytest.approx((4 - 2) * LENGTH / 4)


def test_outcome_tells_what_the_engine_would() -> None:
    trace = small_trace()
    world = world_of(trace, linear_costs(), 8)
    for _ in range(30):
        places = world.places.copy()
        outcome: StepOutcome = world.step(make_policy("ratio:0.5", None, ANY))
        np.testing.assert_array_equal(outcome.accepted, np.minimum(trace.accepted[places], outcome.keep))
        rejected = outcome.accepted < outcome.keep
        known = np.minimum(trace.judged[places], outcome.keep)
        np.testing.assert_array_equal(outcome.judged, known)
        assert (outcome.judged[rejected] >= outcome.accepted[rejected]).all()
        assert outcome.rows == 8 + outcome.keep.sum()


@pytest.mark.parametrize(
    ("policies", "batch", "told"),
    [
        (["plain"], 4, "plain.*h20"),
        (["dflash"], 65, "concurrency=65.*64"),
        (["dflash"], 0, "concurrency=0.*1 to 64"),
    ],
)
def test_what_a_table_does_not_cover_is_refused(policies: list[str], batch: int, told: str) -> None:
    with pytest.raises(SimulationError, match=told):
        simulate(paper_trace("gsm8k"), load_costs("h20"), batch, policies, Run(steps=1))


def test_unknown_policies_and_broken_ones_are_refused() -> None:
    trace, costs = small_trace(), linear_costs(plain=False)
    with pytest.raises(UnsupportedOption, match="nonsense"):
        simulate(trace, costs, 4, ["nonsense"], Run(steps=1))
    with pytest.raises(SimulationError, match=r"'some'.*blocks are whole"):
        world_of(trace, costs, 4).step(Some(2, None))
    with pytest.raises(SimulationError, match="plain_ms"):
        world_of(trace, costs, 4).step(Idle())
    with pytest.raises(SimulationError, match="keep"):
        world_of(trace, costs, 4).step(Greedy())


class Idle(Some):
    name = "idle"

    def __init__(self) -> None:
        super().__init__(None, None)
        self.intent = NO_DRAFT


class Greedy(Some):
    name = "greedy"

    def __init__(self) -> None:
        super().__init__(None, None)

    def select(self, draft: Draft, view: BatchView) -> Selection:
        return Selection(np.full(len(draft.confidence), LENGTH + 1, np.int32), None)


def test_totals_are_of_the_measured_steps() -> None:
    world = world_of(small_trace(), linear_costs(), 4)
    policy = make_policy("dflash", None, ANY)
    first, second = world.run(policy, 10), world.run(policy, 20)
    assert (first.steps, second.steps, world.totals.steps) == (10, 20, 30)
    assert dataclasses.replace(world.totals, ms=0.0).tokens == first.tokens + second.tokens
