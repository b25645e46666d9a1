"""The rules of others, each as its source defines it, on this drafter's confidences and this machine's cost table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dcut_trt.errors import UnsupportedOption
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.packing import budget
from dcut_trt.spec.policy import NO_DRAFT, WHOLE_BLOCK, Steady
from dcut_trt.spec.selector import keep_depths, prefix_log_scores, rank
from dcut_trt.stage_types import BatchView, Draft, DraftTraits, Intent, Offer, Selection, StepOutcome

WARM_UP_DRAFTS = 64  # drafts that SmartSpec sees judged before it believes their acceptance rate
PROBE_EVERY = 32  # steps that SmartSpec decodes plainly before it drafts once more to learn

_REMEMBERED = 0.9  # weight that SmartSpec's acceptance rate keeps from step to step
_UNPROFILED_RATIO = 0.75  # of vLLM's D-cut, for a batch larger than any profiled


class DCutVllm(Steady):
    """D-cut as in vllm-project/vllm pull request #47131 (`_select_dcut_keep_lens`): the paper's rule with two changes.

    Expected tokens are those of the drafts alone, without the B anchors: a ratio whose budget holds no draft scores 0.
    Costs are read at the smallest profiled batch >= B, and where there is none, the ratio is 3/4. Ties go to the first.
    The budget is ceil(B * (D + 1) * ratio) - B drafts, which is the paper's. A device adds the anchors: no offer.
    """

    name = "dcut-vllm"

    def __init__(self, table: CostTable) -> None:
        self.table = table

    def select(self, draft: Draft, view: BatchView) -> Selection:
        batch, length = draft.confidence.shape
        scores = prefix_log_scores(draft.confidence)
        ranked = rank(scores)
        gains = np.cumsum(_probabilities(scores, ranked))  # [B * D]
        ratio = self._ratio(gains, batch, length + 1)
        return Selection(keep_depths(ranked, budget(ratio, batch, length + 1), batch), ratio, scores)

    def _ratio(self, gains: NDArray[np.float64], batch: int, block: int) -> float:
        table = self.table
        larger = [index for index, profiled in enumerate(table.batches) if profiled >= batch]
        if not larger:
            return _UNPROFILED_RATIO
        expected = np.concatenate(([0.0], gains))
        drafts = [budget(ratio, batch, block) - batch for ratio in table.ratios]
        return table.ratios[int(np.argmax(expected[drafts] / table.cost_ms[larger[0]]))]


class Tetris(Steady):
    """TETRIS: Optimal Draft Token Selection for Batch Speculative Decoding (arXiv 2502.15197).

    A step verifies `capacity` drafts in all, the paper's C, whatever the number of requests: those with the highest
    cumulative acceptance probability over the whole batch. It reads no costs.
    """

    def __init__(self, capacity: int, traits: DraftTraits) -> None:
        self.name = f"tetris:{capacity}"
        self.capacity = capacity
        self._block = traits.draft_length + 1

    def select(self, draft: Draft, view: BatchView) -> Selection:
        batch, length = draft.confidence.shape
        scores = prefix_log_scores(draft.confidence)
        rows = batch + min(self.capacity, batch * length)
        return Selection(keep_depths(rank(scores), rows, batch), rows / (batch * (length + 1)), scores)

    def offer(self, batch: int) -> Offer | None:
        if self._block == 1:
            return None  # networks not known
        rows = batch + min(self.capacity, batch * (self._block - 1))
        return Offer((rows / (batch * self._block),), np.ones(1))


class DSpark(Steady):
    """DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation (arXiv 2607.05147).

    Algorithm 1, Hardware-Aware Prefix Scheduler: drafts are admitted in descending order of their survival probability
    a, those of a > 0, while Theta = tau * SPS(B) rises, and no further after the first that does not raise it. tau is
    R + the sum of the admitted a, B the rows of the target's call, SPS(B) steps per second, here from the cost table.
    The paper's scores come from a trained and calibrated confidence head; here from the drafter's probabilities.
    """

    name = "dspark"

    def __init__(self, table: CostTable) -> None:
        self.table = table

    def select(self, draft: Draft, view: BatchView) -> Selection:
        batch, length = draft.confidence.shape
        scores = prefix_log_scores(draft.confidence)
        ranked = rank(scores)
        survival = _probabilities(scores, ranked)  # [B * D], descending
        candidates = survival[: np.count_nonzero(survival)]
        tau = np.cumsum(np.concatenate(([float(batch)], candidates)))
        theta = tau / step_ms(self.table, batch, np.arange(batch, batch + len(tau)), length + 1)
        falls = np.flatnonzero(theta[1:] <= theta[:-1])
        admitted = int(falls[0]) if len(falls) else len(candidates)
        return Selection(keep_depths(ranked, batch + admitted, batch), None, scores)


class SmartSpec:
    """SmartSpec: Optimizing Speculative Decoding for Serving Large Language Models Using Goodput (arXiv 2406.14066).

    One depth k for the whole batch, 0..D, with the most goodput: B * (1 - a^(k+1)) / (1 - a) expected tokens per
    millisecond of a step. a is a moving average of the acceptance rate of single drafts. k = 0 decodes plainly, where
    the cost table knows what that costs. Ours, to start and not to get stuck: whole blocks until WARM_UP_DRAFTS drafts
    were judged; and after PROBE_EVERY plain steps, which tell nothing about a, one step at depth 1.
    """

    name = "smartspec"
    drafts = True
    learns = True

    def __init__(self, table: CostTable, traits: DraftTraits) -> None:
        if traits.draft_length < 1:
            raise UnsupportedOption("policy='smartspec': needs networks whose draft length is known")
        self._table = table
        self._traits = traits
        self._accepted = 0.0
        self._judged = 0.0
        self._seen = 0
        self._plain_steps = 0
        self._depth = traits.draft_length

    @property
    def acceptance(self) -> float | None:
        """The moving average a; None until enough drafts were judged."""
        return self._accepted / self._judged if self._seen >= WARM_UP_DRAFTS else None

    def intend(self, view: BatchView) -> Intent:
        self._depth = self._best_depth(view.batch)
        if self._depth == 0 and self._plain_steps >= PROBE_EVERY:
            self._depth = 1
        self._plain_steps = self._plain_steps + 1 if self._depth == 0 else 0
        if self._depth == 0:
            return NO_DRAFT
        return Intent(self._depth) if self._traits.short_blocks else WHOLE_BLOCK

    def select(self, draft: Draft, view: BatchView) -> Selection:
        return Selection(np.full(len(draft.tokens), self._depth, np.int32), None)

    def offer(self, batch: int) -> Offer | None:
        return None

    def observe(self, outcome: StepOutcome) -> None:
        judged = int(outcome.judged.sum())
        if judged:
            self._accepted = _REMEMBERED * self._accepted + int(outcome.accepted.sum())
            self._judged = _REMEMBERED * self._judged + judged
            self._seen += judged

    def _best_depth(self, batch: int) -> int:
        length, acceptance = self._traits.draft_length, self.acceptance
        if acceptance is None:
            return length
        depths = np.arange(length + 1)
        expected = batch * np.cumsum(acceptance**depths)  # (1 - a^(k+1)) / (1 - a), and k + 1 at a = 1
        return int(np.argmax(expected / self._cost_ms(batch, depths)))

    def _cost_ms(self, batch: int, depths: NDArray[np.intp]) -> NDArray[np.float64]:
        table, nearest = self._table, self._table.nearest(batch)
        cost_ms = step_ms(table, batch, batch * (depths + 1), self._traits.draft_length + 1)
        if self._traits.short_blocks and table.depths is not None and table.draft_ms is not None:
            draft_ms = np.interp(depths, table.depths, table.draft_ms[nearest])
            cost_ms = cost_ms - draft_ms[-1] + draft_ms
        cost_ms[0] = np.inf if table.plain_ms is None else table.plain_ms[nearest]
        return cost_ms


class Threshold(Steady):
    """Of each request, the drafts before the first whose own confidence is below the threshold.

    vllm-project/vllm pull request #43522, "Dynamic verification for dflash" (`dynamic_verifying` a float in (0, 1));
    without its least length, so that a request may keep none.
    """

    def __init__(self, threshold: float) -> None:
        self.name = f"threshold:{threshold:g}"
        self.threshold = threshold

    def select(self, draft: Draft, view: BatchView) -> Selection:
        sure = draft.confidence >= self.threshold  # False for NaN
        return Selection(np.logical_and.accumulate(sure, axis=1).sum(axis=1, dtype=np.int32), None)


class ToDepth(Steady):
    """The first N drafts of every request: the fixed speculation length of ordinary speculative decoding
    (Leviathan et al., arXiv 2211.17192, gamma)."""

    def __init__(self, depth: int, traits: DraftTraits) -> None:
        if depth > traits.draft_length > 0:
            raise UnsupportedOption(f"policy='depth:{depth}': the drafter drafts {traits.draft_length} tokens")
        self.name = f"depth:{depth}"
        self.depth = depth
        self._intent = Intent(depth) if traits.short_blocks else WHOLE_BLOCK

    def intend(self, view: BatchView) -> Intent:
        return self._intent

    def select(self, draft: Draft, view: BatchView) -> Selection:
        batch, length = draft.confidence.shape
        return Selection(np.full(batch, min(self.depth, length), np.int32), None)


def step_ms(table: CostTable, batch: int, rows: NDArray[np.intp], block: int) -> NDArray[np.float64]:
    """Milliseconds of a step that drafts whole blocks of D + 1 = `block` and verifies these rows [n].

    Between the measured ratios' budgets costs are interpolated; `batch` rows cost a plain step and the drafter's pass,
    where both were measured; beyond that the nearest budget's cost counts.
    """
    nearest = table.nearest(batch)
    budgets = [budget(ratio, batch, block) for ratio in table.ratios]
    cost_ms = table.cost_ms[nearest].tolist()
    if table.plain_ms is not None and table.draft_ms is not None:
        budgets.append(batch)
        cost_ms.append(table.plain_ms[nearest] + table.draft_ms[nearest, -1])
    # Ratios too small for one draft share a budget; the first one's cost counts.
    known, first = np.unique(budgets, return_index=True)
    interpolated: NDArray[np.float64] = np.interp(rows, known, np.asarray(cost_ms)[first])
    return interpolated


def _probabilities(scores: NDArray[np.float32], ranked: NDArray[np.int32]) -> NDArray[np.float64]:
    """Probabilities of all drafts [B * D], best first; the anchors, which come before them, left out."""
    batch = len(scores)
    return np.exp(scores.T.ravel()[ranked[batch:]].astype(np.float64))
