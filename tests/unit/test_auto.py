"""The default rule: what it chooses where the answer is known, its parts, and what it never does."""

from __future__ import annotations

import dataclasses
import itertools
import logging

import numpy as np
import pytest
from auto_world import (
    BUCKETS,
    CHEAP,
    FREE,
    MIDDLING,
    RATIOS,
    STEEP,
    Costs,
    D,
    PrefixScore,
    World,
    auto,
    often,
    seldom,
    share,
    view_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scripted_runs import Stream, letters, letters_script, requests

from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import UnsupportedOption
from dcut_trt.spec.auto import PART_NAMES, Auto, AutoParts, make_auto
from dcut_trt.spec.cost_model import CostModel
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.packing import budget
from dcut_trt.spec.policies import check_policy_name, make_policy
from dcut_trt.spec.rules import Plain
from dcut_trt.spec.selector import prefix_log_scores
from dcut_trt.stage_types import BatchView, Draft, DraftTraits, Intent
from dcut_trt.types import FloatArray, Request, SamplingParams


def draft_of(confidence: FloatArray) -> Draft:
    return Draft(np.zeros(confidence.shape, np.int32), confidence)


def arms(world: World) -> set[int | str]:
    return {
        "few" if intent.rows is not None else D if intent.depth is None else intent.depth for intent in world.intents
    }


# What it chooses.


@given(
    arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 3)), elements=st.floats(0, 1, width=32)), st.data()
)
def test_a_step_verifies_what_the_best_of_all_choices_would(confidence: FloatArray, data: st.DataObject) -> None:
    batch, length = confidence.shape
    per_row = data.draw(st.floats(0.01, 5))
    table = CostTable(
        (batch,),
        RATIOS,
        np.array([[8.0 + per_row * budget(ratio, batch, length + 1) for ratio in RATIOS]]),
        None,
        "here",
        "now",
    )
    if table.flat:
        return
    traits = DraftTraits(length, any_budget=True)
    costs = CostModel(table, length)
    policy = Auto(AutoParts(), traits, costs, PrefixScore())
    policy.intend(view_of(batch))
    keep = policy.select(draft_of(confidence), view_of(batch)).keep

    scores = np.exp(prefix_log_scores(confidence))

    def worth(kept: tuple[int, ...]) -> float:
        rows = np.array([batch + sum(kept)])
        expected = sum(scores[row, : depth + 1].sum() for row, depth in enumerate(kept))
        return float(expected / costs.step_ms(batch, rows, length, 50.0)[0])

    best = max(worth(kept) for kept in itertools.product(range(length + 1), repeat=batch))
    assert worth(tuple(keep.tolist())) == pytest.approx(best, rel=1e-5)


def test_the_number_of_rows_changes_seldom_where_a_change_costs() -> None:
    def lived(switch_ms: float) -> tuple[int, float]:
        """Changes of K, and the share of steps at the best K."""
        table = dataclasses.replace(MIDDLING.table(), switch_ms=switch_ms)
        policy = auto(table, depth=False)
        world = World(policy, MIDDLING, often)
        world.run(100, 4)
        rows, at_home = [], 0
        for _ in range(200):
            rows.append(world.step(4).rows)
            at_home += rows[-1] == policy._home[4, D]
        return sum(before != after for before, after in itertools.pairwise(rows)), at_home / len(rows)

    assert lived(0.0)[0] > 150
    changes, at_home = lived(2.0)
    assert changes < 40
    assert at_home > 0.6


def test_a_single_request_keeps_its_number_of_rows_without_looking_each_time() -> None:
    policy = auto(dataclasses.replace(MIDDLING.table(), switch_ms=6.0), depth=False, bypass=False)
    world = World(policy, MIDDLING, often)
    world.run(400, 1)
    late = world.outcomes[-100:]
    unseen = [outcome for outcome in late if outcome.selection.log_scores is None]
    assert 60 <= len(unseen) <= 75  # one step in four teaches
    assert {outcome.rows for outcome in unseen} == {policy._home[1, D]}
    world.run(30, 2)
    assert all(outcome.selection.log_scores is not None for outcome in world.outcomes[-30:])


# Sanity: tables that leave no choice, and none.


@pytest.mark.parametrize("traits", [FREE, BUCKETS])
@pytest.mark.parametrize("chance", [0.05, 0.95])
def test_a_flat_table_verifies_every_draft_that_is_drafted(traits: DraftTraits, chance: float) -> None:
    flat = Costs(base=20.0, per_row=1e-4, draft=0.0)
    table = flat.table()
    assert table.flat
    policy = auto(table, traits, bypass=False, depth=False)
    world = World(policy, flat, lambda draws: np.full_like(draws, chance))
    world.run(60, 4)
    assert all((outcome.keep == D).all() for outcome in world.outcomes)
    assert policy.offer(4).cost_ms.tolist() == [1.0] * 4


@pytest.mark.parametrize("traits", [FREE, BUCKETS])
def test_a_steep_table_drafts_for_nobody(traits: DraftTraits) -> None:
    world = World(auto(STEEP.table(), traits), STEEP, seldom)
    world.run(400, 16)
    assert share(world, 0, 300) > 0.95


def test_a_cheap_table_never_stops_drafting() -> None:
    world = World(auto(CHEAP.table()), CHEAP, often)
    world.run(200, 4)
    assert arms(world) == {D}


def test_without_a_table_every_draft_is_verified_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        policy = make_auto("-depth", None, FREE)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no cost table" in caplog.text
    assert policy.name == "auto:-depth"
    assert policy.intend(view_of(3)) == Intent()
    assert policy.select(draft_of(np.full((3, D), 0.01, np.float32)), view_of(3)).keep.tolist() == [D] * 3
    assert make_policy("dflash", None).name == "dflash"


def test_a_table_that_knows_no_plain_step_always_drafts() -> None:
    full = STEEP.table()
    table = CostTable(full.batches, full.ratios, full.cost_ms, None, "here", "now")
    world = World(auto(table), STEEP, seldom)
    world.run(100, 32)
    assert not {0, "few"} & arms(world)


# Parts.


@pytest.mark.parametrize("text", ["-nothing", "score", "-", "-score-", "-score-score", "-score,-cost", " -score"])
def test_an_unknown_part_is_refused_with_the_parts(text: str) -> None:
    with pytest.raises(UnsupportedOption, match=", ".join(PART_NAMES)):
        check_policy_name(f"auto:{text}")


def test_parts_are_left_out_by_name() -> None:
    check_policy_name("auto")
    assert AutoParts.without("") == AutoParts()
    for name in PART_NAMES:
        check_policy_name(f"auto:-{name}")
        assert AutoParts.without(f"-{name}") == AutoParts(**{name: False})
    policy = make_policy("auto:-score-bypass", MIDDLING.table(), FREE)
    assert policy.name == "auto:-score-bypass"
    assert isinstance(policy, Auto)
    assert policy.parts == AutoParts(score=False, bypass=False)


def test_each_part_that_is_left_out_is_out() -> None:
    table = STEEP.table()

    def world(**parts: bool) -> World:
        lived = World(auto(table, **parts), STEEP, seldom)
        lived.run(200, 8)
        return lived

    assert 0 not in arms(world(bypass=False))
    assert 1 in arms(world(bypass=False))
    assert arms(world(bypass=False, depth=False)) == {D}
    budgets = {budget(ratio, 8, D + 1) for ratio in RATIOS}
    assert {outcome.rows for outcome in world(bypass=False, depth=False, budget=False).outcomes} <= budgets
    assert not {outcome.rows for outcome in world(bypass=False, depth=False).outcomes} <= budgets
    told = MIDDLING.table()
    overrated = dataclasses.replace(told, plain_ms=told.plain_ms * 1.5)
    for cost, finds_out in ((True, True), (False, False)):
        lived = World(auto(overrated, cost=cost, depth=False), MIDDLING, seldom)
        lived.run(300, 16)
        assert (share(lived, 0, 100) > 0.5) == finds_out


# What it never does: change the output.


def served(policy: Auto | Plain, items: list[Request], seed: int) -> dict[str, list[int]]:
    engine = scripted_engine(policy, max_batch=5, accuracy=0.7, seed=seed, script=letters_script())
    streams = {request.request_id: Stream() for request in items}
    waiting = list(items)
    while waiting or engine.has_work:
        while waiting and engine.running + engine.waiting < 5:
            engine.submit(waiting.pop())
        for event in engine.step():
            assert event.error is None
            streams[event.request_id].add(event)
    return {name: stream.tokens for name, stream in streams.items()}


class Restless(Auto):
    """Whatever it may do, it does at random."""

    draws = np.random.default_rng(0)

    def intend(self, view: BatchView) -> Intent:
        super().intend(view)
        draws = self.draws
        depth = [None, 0, 1, 2, 4][draws.integers(5)]
        rows = np.sort(draws.permutation(view.batch)[: draws.integers(1, view.batch + 1)]).astype(np.int32)
        self._intent = Intent(depth, None if depth == 0 or draws.random() < 0.5 else rows)
        return self._intent


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 100), st.sampled_from([0.0, 0.8]), st.sampled_from([CHEAP, MIDDLING, STEEP]), st.booleans())
def test_output_is_plain_decodings(seed: int, temperature: float, costs: Costs, restless: bool) -> None:
    items = [
        Request(f"r{index}", letters(f"p{index + seed}"), 30, SamplingParams(temperature, seed=index))
        for index in range(9)
    ]
    table = costs.table()
    kind = Restless if restless else Auto
    policy = kind(AutoParts(), FREE, CostModel(table, D), PrefixScore())
    assert served(policy, items, seed) == served(Plain(), items, seed)


def test_the_named_policy_serves() -> None:
    policy = make_policy("auto", MIDDLING.table(), FREE)
    found = served(policy, requests(12), 0)
    assert found == served(Plain(), requests(12), 0)
