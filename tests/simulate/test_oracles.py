"""The ceilings: nothing that drafts whole blocks in every step beats them."""

from __future__ import annotations

import pytest
from small_traces import linear_costs, small_trace

from dcut_server.simulate.costs import load_costs
from dcut_server.simulate.lab import Run, simulate
from dcut_server.simulate.paper import DEVICES, paper_trace

POLICIES = ("dflash", "ratio:0.25", "ratio:0.5", "ratio:0.75", "dcut", "threshold:0.5", "oracle-budget", "oracle")


@pytest.mark.parametrize("any_budget", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_nothing_beats_the_oracle_and_only_the_oracle_beats_the_best_budget(device: str, *, any_budget: bool) -> None:
    run = Run(steps=200, warm_up=50, any_budget=any_budget, paired=True)
    cells = simulate(paper_trace("humaneval"), load_costs(device), 32, POLICIES, run)
    speed = {cell.policy: cell.totals.tokens_per_s for cell in cells}
    assert max(speed, key=lambda name: speed[name]) == "oracle"
    # The fixed ratios and the paper's rule rank as this oracle does, and choose among the same budgets.
    rivals = [name for name in POLICIES if name.startswith("ratio") or name in ("dflash", "dcut")]
    assert speed["oracle-budget"] >= max(speed[name] for name in rivals)


def test_oracle_verifies_what_is_accepted_and_nothing_else_where_any_budget_runs() -> None:
    costs = linear_costs(fixed_ms=100.0, row_ms=0.01, plain=False)  # rows cost next to nothing
    run = Run(steps=50, any_budget=True, paired=True)
    oracle, dflash = simulate(small_trace(), costs, 8, ["oracle", "dflash"], run)
    assert oracle.totals.tokens == dflash.totals.tokens
    # At the end of a text the last accepted draft has no token of the target's own after it.
    assert 0 <= oracle.totals.rows - oracle.totals.tokens <= 0.03 * oracle.totals.rows


def test_oracle_verifies_nothing_that_costs_more_than_it_brings() -> None:
    costs = linear_costs(fixed_ms=0.01, row_ms=1.0, plain=False)
    oracle, dflash = simulate(small_trace(), costs, 8, ["oracle", "dflash"], Run(steps=50, paired=True))
    assert oracle.totals.rows < dflash.totals.rows / 2
