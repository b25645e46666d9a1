"""While prompts are being computed, the default rule decides for the batch that will be, not for the part there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from auto_world import FREE, Costs, World, seldom

from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.spec.policies import make_policy
from dcut_trt.stage_types import BatchView, Intent
from dcut_trt.types import Request

COSTS = Costs(base=20.0, per_row=1.0)  # drafting pays for one request and not for 32


def taught() -> World:
    world = World(make_policy("auto", COSTS.table(), FREE), COSTS, seldom)
    for batch in (32, 1):
        world.run(200, batch)
    return world


def test_a_small_batch_that_fills_up_does_not_draft_where_the_full_one_will_not() -> None:
    world = taught()
    alone = world.outcomes[-1].view
    assert world.policy.intend(alone).depth != 0
    assert world.policy.intend(replace(alone, filling=31)).depth == 0
    assert world.policy.intend(alone).depth != 0


def test_the_engine_tells_what_is_filling_and_what_a_prompt_came_before() -> None:
    views: list[BatchView] = []
    policy = make_policy("dflash", None)
    policy.intend = lambda view: (views.append(view), Intent())[1]  # type: ignore[method-assign]
    engine = scripted_engine(policy, prefill_chunk=16, busy_prefill_chunk=16, mean_length=1e9)
    engine.submit(Request("short", tuple(range(65, 70)), 200))
    engine.step()
    engine.step()
    engine.submit(Request("long", (65,) * 40, 200))
    while views[-1].batch < 2:
        engine.step()
    told = [(view.batch, view.filling, view.after_prompt) for view in views]
    assert told == [(1, 0, True), (1, 1, True), (1, 1, True), (2, 0, True)]
    engine.step()
    assert (views[-1].filling, views[-1].after_prompt) == (0, False)
    assert np.array_equal(views[-1].temperatures, np.zeros(2))
