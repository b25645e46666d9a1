"""What a rule must offer that decides, each step, who drafts and how many drafts are verified."""

from __future__ import annotations

from typing import Protocol

from dcut_trt.stage_types import BatchView, Draft, Intent, Offer, Selection, StepOutcome

WHOLE_BLOCK = Intent()
NO_DRAFT = Intent(depth=0)


class Policy(Protocol):
    """drafts: False when the rule never drafts, so that no features need be kept for the drafter.
    learns: whether it wants to observe().

    A policy serves one engine and is called from its thread: intend(), then select() if anybody drafted, then
    observe(). On a device that selects by itself, offer() stands for select().
    """

    name: str
    drafts: bool
    learns: bool

    def intend(self, view: BatchView) -> Intent:
        """Who drafts in this step, and how far."""

    def select(self, draft: Draft, view: BatchView) -> Selection:
        """Keep depths for the drafts [b, depth] of those that were to draft; view is of the whole batch."""

    def offer(self, batch: int) -> Offer | None:
        """The same rule as ratios and costs, for a device that selects by itself; None when it cannot be put so."""

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from what the step turned out to be."""


class Steady:
    """A rule that always drafts whole blocks for all, selects on the host, and learns nothing."""

    drafts = True
    learns = False

    def intend(self, view: BatchView) -> Intent:
        return WHOLE_BLOCK

    def observe(self, outcome: StepOutcome) -> None:
        pass

    def offer(self, batch: int) -> Offer | None:
        return None
