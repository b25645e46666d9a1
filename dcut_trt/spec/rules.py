"""Plain decoding, DFlash, a fixed ratio, and the paper's rule."""

from __future__ import annotations

import numpy as np

from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.packing import budget
from dcut_trt.spec.policy import NO_DRAFT, Steady
from dcut_trt.spec.selector import choose_ratio, keep_depths, prefix_log_scores, rank
from dcut_trt.stage_types import BatchView, Draft, Intent, Offer, Selection


class Plain(Steady):
    """No speculation: one token per request and step."""

    name = "plain"
    drafts = False

    def intend(self, view: BatchView) -> Intent:
        return NO_DRAFT

    def select(self, draft: Draft, view: BatchView) -> Selection:
        return Selection(np.zeros(len(draft.tokens), np.int32), None)


class FixedDepth(Steady):
    """Verify every draft, as DFlash does."""

    name = "dflash"

    def select(self, draft: Draft, view: BatchView) -> Selection:
        batch, length = draft.confidence.shape
        return Selection(np.full(batch, length, np.int32), 1.0)

    def offer(self, batch: int) -> Offer:
        return Offer((1.0,), np.ones(1))


class FixedRatio(Steady):
    """Keep the best K_rho(B) positions at one ratio, whatever they cost."""

    def __init__(self, ratio: float) -> None:
        self.name = f"ratio:{ratio:g}"
        self.ratio = ratio

    def select(self, draft: Draft, view: BatchView) -> Selection:
        batch, length = draft.confidence.shape
        ranked = rank(prefix_log_scores(draft.confidence))
        return Selection(keep_depths(ranked, budget(self.ratio, batch, length + 1), batch), self.ratio)

    def offer(self, batch: int) -> Offer:
        return Offer((self.ratio,), np.ones(1))


class DCut(Steady):
    """The paper's rule: the ratio with the most expected tokens per profiled millisecond (arXiv 2607.14647)."""

    name = "dcut"

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._offers: dict[int, Offer] = {}

    def select(self, draft: Draft, view: BatchView) -> Selection:
        batch, length = draft.confidence.shape
        log_scores = prefix_log_scores(draft.confidence)
        ranked = rank(log_scores)
        offer = self.offer(batch)
        ratio = offer.ratios[choose_ratio(log_scores, ranked, offer.ratios, offer.cost_ms)]
        return Selection(keep_depths(ranked, budget(ratio, batch, length + 1), batch), ratio)

    def offer(self, batch: int) -> Offer:
        if batch not in self._offers:
            # Differences within a flat table are noise; equal costs let the most tokens win: every draft is verified.
            cost_ms = np.ones(len(self.table.ratios)) if self.table.flat else self.table.row(batch)
            self._offers[batch] = Offer(self.table.ratios, cost_ms)
        return self._offers[batch]
