"""Looks over a policy's shoulder: what it drafted, kept and saw accepted, and what it thought of the drafts before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcut_trt.spec.policy import Policy
from dcut_trt.stage_types import BatchView, Draft, Intent, Offer, Selection, StepOutcome
from dcut_trt.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Watched:
    """The blocks of one step. depth: drafts in each.  keep, accepted, judged: [b] as in StepOutcome.

    confidence: [b, depth] and log_scores: [b, depth + 1], None where the host has not seen any.
    """

    depth: int
    keep: IntArray
    accepted: IntArray
    judged: IntArray
    confidence: FloatArray | None
    log_scores: FloatArray | None


class Watcher:
    """A policy that does what another does, and keeps the arrays of its steps until they are taken."""

    learns = True

    def __init__(self, policy: Policy, draft_length: int) -> None:
        self.policy = policy
        self.name, self.drafts = policy.name, policy.drafts
        self._draft_length = draft_length
        self._watched: list[Watched] = []

    def intend(self, view: BatchView) -> Intent:
        return self.policy.intend(view)

    def select(self, draft: Draft, view: BatchView) -> Selection:
        return self.policy.select(draft, view)

    def offer(self, batch: int) -> Offer | None:
        return self.policy.offer(batch)

    def observe(self, outcome: StepOutcome) -> None:
        if self.policy.learns:
            self.policy.observe(outcome)
        intent, draft, selection = outcome.intent, outcome.draft, outcome.selection
        depth = self._draft_length if intent.depth is None else intent.depth
        rows = np.arange(outcome.view.batch) if intent.rows is None else intent.rows
        if depth == 0 or len(rows) == 0:
            return
        # Copies: the arrays may be a runtime's buffers, and statistics wait until the pass is over.
        self._watched.append(
            Watched(
                depth=depth,
                keep=outcome.keep[rows],
                accepted=outcome.accepted[rows],
                judged=outcome.judged[rows],
                confidence=None if draft is None or draft.confidence.size == 0 else draft.confidence.copy(),
                log_scores=None if selection is None or selection.log_scores is None else selection.log_scores.copy(),
            )
        )

    def take(self) -> tuple[Watched, ...]:
        """What was watched since the last call."""
        taken, self._watched = tuple(self._watched), []
        return taken
