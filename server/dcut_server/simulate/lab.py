"""Policies against each other in one simulated world."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dcut_server.simulate.costs import Costs, load_costs
from dcut_server.simulate.oracles import ORACLES, Oracle, OracleBudget
from dcut_server.simulate.paper import (
    CONCURRENCY,
    DATASETS,
    DEVICES,
    METHODS,
    Comparison,
    compare,
    paper_trace,
)
from dcut_server.simulate.traces import Trace
from dcut_server.simulate.world import SimulationError, Totals, World
from dcut_trt.spec.cost_model import CostModel
from dcut_trt.spec.policies import check_policy_name, make_policy
from dcut_trt.spec.policy import Policy
from dcut_trt.stage_types import DraftTraits


@dataclass(frozen=True, slots=True)
class Run:
    """steps: measured ones.  warm_up: steps before them, in which a policy may learn.  any_budget: as in DraftTraits.
    paired: as in World.
    """

    steps: int = 500
    warm_up: int = 100
    seed: int = 0
    any_budget: bool = False
    paired: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy in one world. passes: how often each text was begun."""

    costs: str
    trace: str
    policy: str
    totals: Totals
    passes: float


def check_policies(names: Sequence[str], costs: Costs) -> None:
    """Raises UnsupportedOption for an unknown name, SimulationError for one that these costs do not cover."""
    for name in names:
        if name not in ORACLES:
            check_policy_name(name)
        if name == "plain" and costs.table.plain_ms is None:
            raise SimulationError(f"policy 'plain': {costs.name} does not say what a step without drafting costs")


def simulate(trace: Trace, costs: Costs, batch: int, policies: Sequence[str], run: Run) -> list[Cell]:
    """Every policy at one concurrency, each in a world of its own that begins alike."""
    check_policies(policies, costs)
    largest = costs.table.batches[-1]
    if not 1 <= batch <= largest:
        raise SimulationError(f"concurrency={batch}: must be 1 to {largest}, the largest batch of {costs.name}")
    cells = []
    for name in policies:
        model = CostModel(costs.table, trace.draft_length)
        short = costs.table.draft_ms is not None
        traits = DraftTraits(trace.draft_length, run.any_budget, short_blocks=short and run.any_budget)
        policy = _policy(name, model, costs, traits)
        world = World(trace, model, batch, traits, seed=run.seed, paired=run.paired)
        world.run(policy, run.warm_up)
        totals = world.run(policy, run.steps)
        cells.append(Cell(costs.name, trace.name, name, totals, world.passes))
    return cells


def paper_table2(run: Run) -> list[Comparison]:
    """All 72 cells of the paper's Table 2, published beside simulated."""
    comparisons = []
    for device, dataset, batch in itertools.product(DEVICES, DATASETS, CONCURRENCY):
        trace = paper_trace(dataset, run.seed)
        base, *cells = simulate(trace, load_costs(device), batch, ("dflash", *METHODS), run)
        for cell in cells:
            ms = (1e3 / entry.totals.tokens_per_s for entry in (base, cell))
            comparisons.append(compare(device, dataset, batch, cell.policy, *ms))
    return comparisons


def _policy(name: str, model: CostModel, costs: Costs, traits: DraftTraits) -> Policy:
    match name:
        case Oracle.name:
            return Oracle(model, traits)
        case OracleBudget.name:
            return OracleBudget(model, traits)
        case _:
            return make_policy(name, costs.table, traits)
