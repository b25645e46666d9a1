"""When the default rule changes its mind, and what it spends on looking whether it should."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from auto_world import BUCKETS, MIDDLING, STEEP, Costs, D, World, auto, often, seldom, share, view_of

from dcut_trt.spec.load import Load
from dcut_trt.spec.packing import budget
from dcut_trt.spec.rules import DCut, Plain


def test_it_is_about_as_fast_as_the_best_of_plain_and_the_papers_rule() -> None:
    for costs, accept, batch in itertools.product((MIDDLING, STEEP), (seldom, often), (2, 32)):
        rates = [
            World(policy, costs, accept).run(800, batch)
            for policy in (auto(costs.table()), Plain(), DCut(costs.table()))
        ]
        assert rates[0] > 0.97 * max(rates[1:]), (costs, accept.__name__, batch, rates)


def test_noise_does_not_make_it_flap() -> None:
    even = Costs(base=8.0, per_row=0.52, draft=0.03, noise=0.2)  # at 8 requests both arms are within a few per cent
    for seed in range(3):
        policy = auto(even.table(), depth=False)
        world = World(policy, even, seldom, seed=seed)
        chosen = []
        for _ in range(1500):
            world.step(8)
            chosen.append(policy._arms.current(Load(8)))
        assert sum(before != after for before, after in itertools.pairwise(chosen)) <= 6


def test_a_table_that_overrates_plain_decoding_is_found_out() -> None:
    for factor in (0.8, 1.25):
        costs = Costs(base=8.0, per_row=0.5, draft=0.03)
        told = costs.table()
        table = dataclasses.replace(told, plain_ms=told.plain_ms * factor)
        best = max(World(policy, costs, seldom).run(1500, 8) for policy in (auto(told), Plain()))
        world = World(auto(table), costs, seldom)
        world.run(500, 8)
        assert world.run(1500, 8) > 0.98 * best


def test_it_follows_the_traffic_within_a_few_steps() -> None:
    costs = Costs(base=20.0, per_row=1.0)
    world = World(auto(costs.table()), costs, seldom)
    world.run(200, 32)
    assert share(world, 0, 100) > 0.9
    world.run(20, 1)
    assert share(world, 0, 14) <= 6 / 14  # a trial without drafting may be among them
    world.run(20, 32)
    assert share(world, 0, 16) > 0.9


def test_greedy_and_sampled_traffic_are_known_apart() -> None:
    world = World(auto(MIDDLING.table()), MIDDLING, often)

    def serve(temperature: float, steps: int) -> None:
        world.temperature, world.accept = temperature, (seldom if temperature else often)
        world.run(steps, 8)

    for temperature in (0.0, 1.0):
        serve(temperature, 400)
    serve(0.0, 20)
    assert share(world, 0, 20) <= 6 / 20  # a trial without drafting may be among them
    serve(1.0, 20)
    assert share(world, 0, 20) > 0.6


def test_it_comes_back_when_drafts_get_better_while_it_drafts_for_nobody() -> None:
    world = World(auto(MIDDLING.table()), MIDDLING, seldom)
    world.run(1500, 8)
    assert share(world, 0, 1000) > 0.95
    world.accept = lambda draws: np.full_like(draws, 0.95)
    world.run(1200, 8)
    assert share(world, 0, 300) == 0


@pytest.mark.parametrize("depth", [False, True])
def test_probes_cost_little_and_become_rare(depth: bool) -> None:
    world = World(auto(STEEP.table(), depth=depth), STEEP, seldom)
    world.run(3000, 32)
    probes = [step for step, intent in enumerate(world.intents) if intent.depth != 0]
    if not depth:  # drafting is so much slower then that nobody tries it with all requests
        assert all(len(world.intents[step].rows) <= 8 for step in probes)
        assert all(world.outcomes[step].keep.sum() > 0 for step in probes)
    late = [step for step in probes if step > 300]
    assert 1 <= len(late) <= 48
    extra = sum(world.outcomes[step].step_ms - STEEP.plain_ms(32) for step in late)
    assert extra < 0.01 * sum(outcome.step_ms for outcome in world.outcomes)


def test_a_probe_asks_those_with_the_least_to_catch_up() -> None:
    policy = auto(STEEP.table())
    pending = np.array([500, 3, 400, 2, 100, 1, 300, 9, 8, 7, 6, 5], np.int32)
    assert policy.intend(view_of(12, pending)).rows.tolist() == [1, 3, 5, 11]


def test_a_device_that_selects_by_itself_is_bypassed_too() -> None:
    policy = auto(STEEP.table(), BUCKETS)
    world = World(policy, STEEP, seldom)
    for _ in range(400):
        outcome = world.step(16)
        assert outcome.intent.rows is None
        assert outcome.intent.depth in (0, None)
    assert share(world, 0, 300) > 0.95
    ratios, batch = policy.offer(16).ratios, 16
    sizes = {budget(ratio, batch, D + 1) for ratio in ratios}
    assert {outcome.rows for outcome in world.outcomes} <= {batch, *sizes}
