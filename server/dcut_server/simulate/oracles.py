"""Two rules that know which drafts will be accepted: the ceilings that a simulation can hold the others against."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dcut_trt.spec.cost_model import CostModel
from dcut_trt.spec.packing import budget
from dcut_trt.spec.policy import Steady
from dcut_trt.spec.selector import keep_depths, prefix_log_scores, rank
from dcut_trt.stage_types import BatchView, Draft, DraftTraits, Selection, StepOutcome
from dcut_trt.types import IntArray

ORACLES = ("oracle", "oracle-budget")


@runtime_checkable
class Seer(Protocol):
    """A rule that is told, before it selects, what the target would accept."""

    def foresee(self, accepted: IntArray) -> None: ...


class _Oracle(Steady):
    """Whole blocks for all. The budget with the most tokens above what its time is worth: a step takes its
    milliseconds from later steps, which would have made tokens at the mean rate (Dinkelbach's parametric form of the
    ratio's maximum).
    """

    learns = True

    def __init__(self, model: CostModel, traits: DraftTraits) -> None:
        self.model = model
        self.traits = traits
        self._accepted: IntArray = np.empty(0, np.int32)
        self._tokens = self._ms = 0.0

    def foresee(self, accepted: IntArray) -> None:
        self._accepted = accepted

    def observe(self, outcome: StepOutcome) -> None:
        self._tokens += float(outcome.accepted.sum()) + outcome.view.batch
        self._ms += outcome.step_ms

    def _best(self, rows: NDArray[np.int64], tokens: NDArray[np.int64], view: BatchView) -> int:
        """The index with the highest gain; before the first step, with the highest ratio."""
        depth, context = self.traits.draft_length, float(view.context_lens.mean())
        cost_ms = self.model.step_ms(view.batch, rows, depth, context)
        if not self._ms:
            return int(np.argmax(tokens / cost_ms))
        return int(np.argmax(tokens - cost_ms * (self._tokens / self._ms)))

    def _budgets(self, view: BatchView) -> NDArray[np.int64]:
        """Every K that the target can run, ascending."""
        block = self.traits.draft_length + 1
        if self.traits.any_budget:
            return np.arange(view.batch, view.batch * block + 1)
        ratios = self.model.table.ratios
        return np.array(sorted({budget(ratio, view.batch, block) for ratio in ratios}), np.int64)


class Oracle(_Oracle):
    """Ranks perfectly, chooses the budget perfectly: nothing that drafts whole blocks in every step is faster."""

    name = "oracle"

    def select(self, draft: Draft, view: BatchView) -> Selection:
        batch, length = draft.confidence.shape
        budgets = self._budgets(view)
        useful = batch + int(self._accepted.sum())
        size = int(budgets[self._best(budgets, np.minimum(budgets, useful), view)])
        # Accepted drafts come first, the shallow ones before the deep; what is left over is filled as it comes.
        depths = np.arange(1, length + 1)
        scores = np.zeros((batch, length + 1), np.float32)
        scores[:, 1:] = -depths / (length + 1) - np.where(depths <= self._accepted[:, None], 0.0, 1.0)
        return Selection(keep_depths(rank(scores), size, batch), size / (batch * (length + 1)), scores)


class OracleBudget(_Oracle):
    """Ranks as the paper does, by the prefix product, and knows what each budget would have brought."""

    name = "oracle-budget"

    def select(self, draft: Draft, view: BatchView) -> Selection:
        batch, length = draft.confidence.shape
        scores = prefix_log_scores(draft.confidence)
        ranked = rank(scores)
        budgets = self._budgets(view)
        emitted = np.cumsum(ranked // batch <= self._accepted[ranked % batch])  # of the best K, for every K
        size = int(budgets[self._best(budgets, emitted[budgets - 1], view)])
        return Selection(keep_depths(ranked, size, batch), size / (batch * (length + 1)), scores)
