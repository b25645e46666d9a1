"""A world with known acceptance and known costs, in which a policy is stepped without any network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dcut_trt.spec.auto import Auto, AutoParts
from dcut_trt.spec.cost_model import CostModel
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.packing import budget
from dcut_trt.spec.policy import Policy
from dcut_trt.spec.selector import prefix_log_scores
from dcut_trt.stage_types import BatchView, Draft, DraftTraits, Intent, StepOutcome
from dcut_trt.types import FloatArray, IntArray

D = 7
RATIOS = (0.25, 0.5, 0.75, 1.0)
BATCHES = (1, 2, 4, 8, 16, 32)


class PrefixScore:
    """Stands for AcceptanceScore where the drafter is calibrated already, as this world's is."""

    judged = 0

    def log_scores(self, draft: Draft, view: BatchView, rows: IntArray | None) -> FloatArray:
        return prefix_log_scores(draft.confidence)

    def learn(self, outcome: StepOutcome) -> None:
        self.judged += int(outcome.judged.sum())


@dataclass
class Costs:
    """Milliseconds: of a target call `base` and `per_row`, of the drafter's pass `draft` per request and depth."""

    base: float = 8.0
    per_row: float = 0.4
    draft: float = 0.05
    noise: float = 0.0

    def plain_ms(self, batch: int) -> float:
        return self.base + self.per_row * batch

    def draft_ms(self, batch: int, depth: int) -> float:
        return 1.0 + self.draft * batch * (depth + 1)

    def table(self) -> CostTable:
        def step(batch: int, ratio: float) -> float:
            return self.base + self.per_row * budget(ratio, batch, D + 1) + self.draft_ms(batch, D)

        depths = (1, 2, 4, D)
        return CostTable(
            BATCHES,
            RATIOS,
            np.array([[step(batch, ratio) for ratio in RATIOS] for batch in BATCHES]),
            np.array([self.plain_ms(batch) for batch in BATCHES]),
            "here",
            "now",
            depths=depths,
            draft_ms=np.array([[self.draft_ms(batch, depth) for depth in depths] for batch in BATCHES]),
        )


@dataclass
class World:
    """accept: probability that a draft is accepted if those before it are, of a block's draws [b, D] in [0, 1)."""

    policy: Policy
    costs: Costs
    accept: Callable[[FloatArray], FloatArray]
    seed: int = 0
    temperature: float = 0.0
    intents: list[Intent] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draws = np.random.default_rng(self.seed)
        self._pending = np.zeros(64, np.int32)

    def run(self, steps: int, batch: int) -> float:
        """Tokens per millisecond over these steps."""
        tokens, passed = 0, 0.0
        for _ in range(steps):
            outcome = self.step(batch)
            tokens += batch + int(outcome.accepted.sum())
            passed += outcome.step_ms
        return tokens / passed

    def step(self, batch: int) -> StepOutcome:
        view = BatchView(
            tuple(f"r{row}" for row in range(batch)),
            np.full(batch, 100, np.int32),
            self._pending[:batch].copy(),
            np.full(batch, self.temperature, np.float32),
        )
        intent = self.policy.intend(view)
        drafting = np.arange(batch if intent.depth != 0 else 0) if intent.rows is None else intent.rows
        depth = D if intent.depth is None else intent.depth
        keep, accepted, judged = (np.zeros(batch, np.int32) for _ in range(3))
        draft = selection = None
        if len(drafting):
            chance = self.accept(self._draws.random((len(drafting), D))).astype(np.float32)[:, :depth]
            draft = Draft(np.zeros((len(drafting), depth), np.int32), chance)
            selection = self.policy.select(draft, view)
            keep[drafting] = selection.keep
            right = np.cumprod(self._draws.random(chance.shape) < chance, axis=1).sum(axis=1)
            accepted[drafting] = np.minimum(right, selection.keep)
            judged[drafting] = np.minimum(accepted[drafting] + 1, selection.keep)
        rows = batch + int(keep.sum())
        draft_ms = self.costs.draft_ms(len(drafting), depth) if len(drafting) else 0.0
        factor = float(np.exp(self.costs.noise * self._draws.normal()))
        step_ms = factor * (self.costs.base + self.costs.per_row * rows + draft_ms)
        outcome = StepOutcome(
            view, intent, draft, selection, keep, accepted, judged, rows, draft_ms, step_ms - draft_ms, step_ms
        )
        self._pending[:batch] += 1 + accepted
        self._pending[drafting] = 0
        self.policy.observe(outcome)
        self.intents.append(intent)
        self.outcomes.append(outcome)
        return outcome


FREE = DraftTraits(D, any_budget=True, short_blocks=True)
BUCKETS = DraftTraits(D)
CHEAP, MIDDLING, STEEP = Costs(per_row=0.05, draft=0.01), Costs(), Costs(base=1.0, per_row=1.5)


def seldom(draws: FloatArray) -> FloatArray:
    return 0.2 + 0.6 * draws**2


def often(draws: FloatArray) -> FloatArray:
    return draws**0.25


def auto(table: CostTable, traits: DraftTraits = FREE, **parts: bool) -> Auto:
    chosen = AutoParts(**parts)
    costs = CostModel(table if chosen.cost else table.bare, D)
    return Auto(chosen, traits, costs, PrefixScore())


def view_of(batch: int, pending: IntArray | None = None) -> BatchView:
    context = np.full(batch, 50, np.int32)
    pending = np.zeros(batch, np.int32) if pending is None else pending
    return BatchView(tuple(map(str, range(batch))), context, pending, np.zeros(batch, np.float32))


def share(world: World, depth: int, last: int) -> float:
    return sum(intent.depth == depth for intent in world.intents[-last:]) / last
