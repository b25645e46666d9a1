"""Rules that decide, each step, whether to draft and how many drafts of each request to verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dcut_trt.errors import UnsupportedOption
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.packing import budget
from dcut_trt.spec.selector import choose_ratio, keep_depths, prefix_log_scores, rank
from dcut_trt.types import FloatArray, IntArray, Offer


@dataclass(frozen=True, slots=True)
class Selection:
    """keep: [B] drafts to verify per request.  ratio: the fraction of positions aimed at, None without one."""

    keep: IntArray
    ratio: float | None


class Policy(Protocol):
    """drafts: False when the rule never drafts, so that no features need be kept for the drafter."""

    name: str
    drafts: bool

    def drafts_at(self, batch: int) -> bool:
        """Whether to draft in a step of this many requests."""

    def select(self, confidence: FloatArray) -> Selection:
        """Keep depths for drafts of this confidence [B, D]."""

    def offer(self, batch: int) -> Offer | None:
        """The same rule as ratios and costs, for a device that selects by itself; None when it cannot be put so."""


class Plain:
    """No speculation: one token per request and step."""

    name = "plain"
    drafts = False

    def drafts_at(self, batch: int) -> bool:
        return False

    def select(self, confidence: FloatArray) -> Selection:
        return Selection(np.zeros(len(confidence), np.int32), None)

    def offer(self, batch: int) -> Offer | None:
        return None


class FixedDepth:
    """Verify every draft, as DFlash does."""

    name = "dflash"
    drafts = True

    def drafts_at(self, batch: int) -> bool:
        return True

    def select(self, confidence: FloatArray) -> Selection:
        batch, length = confidence.shape
        return Selection(np.full(batch, length, np.int32), 1.0)

    def offer(self, batch: int) -> Offer:
        return Offer((1.0,), np.ones(1))


class FixedRatio:
    """Keep the best K_rho(B) positions at one ratio, whatever they cost."""

    drafts = True

    def __init__(self, ratio: float) -> None:
        self.name = f"ratio:{ratio:g}"
        self.ratio = ratio

    def drafts_at(self, batch: int) -> bool:
        return True

    def select(self, confidence: FloatArray) -> Selection:
        batch, length = confidence.shape
        ranked = rank(prefix_log_scores(confidence))
        return Selection(keep_depths(ranked, budget(self.ratio, batch, length + 1), batch), self.ratio)

    def offer(self, batch: int) -> Offer:
        return Offer((self.ratio,), np.ones(1))


class DCut:
    """The paper's rule: the ratio with the most expected tokens per profiled millisecond (arXiv 2607.14647)."""

    name = "dcut"
    drafts = True

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._offers: dict[int, Offer] = {}

    def drafts_at(self, batch: int) -> bool:
        return True

    def select(self, confidence: FloatArray) -> Selection:
        batch, length = confidence.shape
        log_scores = prefix_log_scores(confidence)
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


POLICY_NAMES = "plain, dflash, ratio:R (0 < R <= 1), dcut"


def check_policy_name(name: str) -> None:
    """Raises UnsupportedOption naming what is offered, before any engine is loaded."""
    if name in ("plain", "dflash", "dcut"):
        return
    kind, _, number = name.partition(":")
    try:
        if kind == "ratio" and 0 < float(number) <= 1:
            return
    except ValueError:
        pass
    raise UnsupportedOption(f"policy={name!r}: must be one of {POLICY_NAMES}")


def make_policy(name: str, table: CostTable | None) -> Policy:
    """The policy of this name.

    Raises UnsupportedOption for an unknown name, and for dcut without a cost table.
    """
    check_policy_name(name)
    if name == "plain":
        return Plain()
    if name == "dflash":
        return FixedDepth()
    if name == "dcut":
        if table is None:
            raise UnsupportedOption("policy='dcut': needs a cost table, and none was measured or loaded")
        return DCut(table)
    return FixedRatio(float(name.partition(":")[2]))
