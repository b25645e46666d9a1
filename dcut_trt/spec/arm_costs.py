"""What an arm costs beyond what the cost model knows: against the other arm, and what is owed to the drafter."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcut_trt.spec.load import Kind, Load
from dcut_trt.stage_types import BatchView

_LASTING = 6  # steps of an arm after which it is the one in use; the other one's steps tell how they differ
_FOLLOW, _DIFFER = 0.1, 0.1  # how much a step counts for the one and for the other, after the first ones
_SHIFT = 0.1  # of the level since the arms were last compared, after which their difference may be another
_ODD = 0.25  # of the logarithm of measured over predicted; more than that counts as this


@dataclass(slots=True)
class _Record:
    """Logarithms of measured over predicted: level of drafting steps, offset of the others from it.

    drafting: whether the arm in use drafts.
    """

    drafting: bool

    level: float = 0.0
    offset: float = -0.05  # served, drafting steps vary more than profiled ones, and that costs
    tried_at: float = 0.0  # the level when the arms were last measured against each other
    levels: int = 0
    offsets: int = 4  # steps that the first guess is worth


class ArmTimes:
    """How much longer than predicted steps without drafting take, if those with drafts take as long as predicted.

    Between the two a few per cent decide, and the table may be wrong by more. What slows the machine down slows both,
    and must not be mistaken for a difference: the two are compared only where they follow each other.
    """

    def __init__(self) -> None:
        self._records: dict[Kind, _Record] = {}  # by kind of load
        self._last = (Load(0), False)  # and whether it drafted
        self._run = 0  # steps of this kind so far

    def learn(self, load: Load, measured_ms: float, predicted_ms: float, *, drafting: bool) -> None:
        arm = (load, drafting)
        before, self._last = self._last, arm
        self._run = self._run + 1 if arm == before else 0
        if self._run == 0:
            return  # the first of a kind is slower: another number of rows, features that waited
        record = self._records.setdefault(load.kind, _Record(drafting))
        if self._run >= _LASTING:
            record.drafting = drafting
        odd = math.log(measured_ms / predicted_ms) - record.level - (0.0 if drafting else record.offset)
        odd = min(max(odd, -_ODD), _ODD)
        if drafting != record.drafting:
            share = max(_DIFFER, 1 / (record.offsets + 2))
            record.offset += -share * odd if drafting else share * odd
            record.offsets += 1
            record.tried_at = record.level
        else:
            record.level += max(_FOLLOW, 1 / (record.levels + 1)) * odd
            record.levels += 1

    def shifted(self, load: Load) -> bool:
        """Whether the arm in use takes another time than when the two were last measured against each other: what slows
        the machine down seldom slows both alike, so what is known of the difference is old."""
        record = self._records.get(load.kind)
        if record is None or abs(record.level - record.tried_at) < _SHIFT:
            return False
        record.tried_at = record.level
        return True

    def plain_factor(self, load: Load) -> float:
        """By which to correct what a step without drafting is predicted to take, if drafting is not corrected."""
        record = self._records.get(load.kind)
        return 1.0 if record is None else math.exp(record.offset)


_FORGETTING = 0.98
_REMEMBERED = 256  # steps; those before weigh less than a hundredth of the latest
_TERMS = 3  # a constant, per drafted row, per pending row
_MEMORY_TOKENS = 4_000  # emitted tokens after which a prompt counts 1 / e


class FeedCost:
    """Milliseconds of the drafter for feature rows that it has yet to take up.

    What a row costs is fitted to the steps that drafted. The rows of prompts are part of what drafting costs, and in no
    step's own prediction: a step without drafts leaves them to wait, and the request may end before anybody drafts.
    """

    def __init__(self) -> None:
        self._moments = np.eye(_TERMS) * 1e-3
        self._sums: NDArray[np.float64] = np.zeros(_TERMS)
        self._slope = 0.0
        self._new: deque[tuple[float, int, int, float]] = deque(maxlen=_REMEMBERED)  # steps not fitted to yet
        self._live: tuple[str, ...] = ()
        self._prompt_rows = self._tokens = 0.0  # of late

    def learn(self, drafted_rows: int, pending_rows: int, draft_ms: float) -> None:
        self._new.append((1.0, drafted_rows, pending_rows, draft_ms))

    def meet(self, view: BatchView, tokens: int) -> None:
        """A step of these requests emitted so many tokens."""
        if view.request_ids != self._live:
            before, self._live = set(self._live), view.request_ids
            new = [row for row, name in enumerate(view.request_ids) if name not in before]
            self._prompt_rows += float(view.pending_rows[new].sum())
        kept = math.exp(-tokens / _MEMORY_TOKENS)
        self._prompt_rows *= kept
        self._tokens = self._tokens * kept + tokens

    def prompts_ms(self) -> float:
        """Of the prompts, per emitted token."""
        return self(1) * self._prompt_rows / max(self._tokens, 1.0)

    def __call__(self, pending_rows: int) -> float:
        if self._new:
            steps = np.array(self._new)  # [n, _TERMS + 1], oldest first
            terms, draft_ms = steps[:, :_TERMS], steps[:, _TERMS]
            weights = _FORGETTING ** np.arange(len(steps))[::-1]
            faded = _FORGETTING ** len(steps)
            self._moments = faded * self._moments + (terms.T * weights) @ terms
            self._sums = faded * self._sums + terms.T @ (weights * draft_ms)
            self._slope = max(0.0, float(np.linalg.solve(self._moments, self._sums)[2]))
            self._new.clear()
        return self._slope * pending_rows
