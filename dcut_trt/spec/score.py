"""The probability that a draft and all before it are accepted, learnt from the drafts that were judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcut_trt.stage_types import BatchView, Draft, StepOutcome
from dcut_trt.types import FloatArray, IntArray

Floats = NDArray[np.float64]

CERTAIN = 1e-6  # confidence is kept this far from 0 and 1 where its odds are taken
LESSON_BLOCKS, LESSON = 4, 24  # blocks, and judged drafts, that are learnt from at once: each step would pay for itself
MEMORY_DRAFTS = 8_000  # judged drafts after which what was learnt from one has faded to 1 / e
PRIOR = 4.0  # how firmly a weight is held at 0, as information about it
FEATURES = 7

SLOT_BITS = 17  # of the table that wordings share; two that meet in one slot share its weight
SLOT_PRIOR = 0.5  # as PRIOR, of a slot
SLOT_INFORMATION = 8.0  # at most, so that a slot still follows a change
_MIXERS = np.array(  # odd, their bits well spread
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], np.uint64
)

OWN_MEMORY_BLOCKS = 8.0  # as MEMORY_DRAFTS, of a request's own surprises
OWN_PRIOR = 4.0  # judged drafts that a request's own surprises are spread over besides its own


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the model sees in drafts [b, d], and what it says. names: of the requests.  features: [b, d, FEATURES].
    slots: [b, d, 2 or 0].

    log_odds: [b, d].  usable: [b, d] False where a draft cannot be accepted.
    """

    names: Sequence[str]
    features: Floats
    slots: NDArray[np.intp]
    log_odds: Floats
    usable: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Judged:
    """A step's drafts [b, d] and how they turned out. accepted, judged: [b]."""

    seen: _Seen
    accepted: IntArray
    judged: IntArray


@dataclass(frozen=True, slots=True)
class _Lesson:
    """Judged drafts [n] and how they turned out. features: [n, FEATURES].  slots: [n, 2 or 0].  surprise: accepted
    less expected.  variance: of what was expected."""

    features: Floats
    slots: NDArray[np.intp]
    surprise: Floats
    variance: Floats


class AcceptanceScore:
    """A discrete hazard model: how probable it is that the target accepts a draft when it accepted all before it.

    The drafter's own log odds are corrected by weights that start at 0, so an untaught score is the prefix product
    (paper, Eq. 3). One set of weights is dense and moves by Newton's steps; another has a weight for each wording, the
    draft after the one and the two tokens before it, in a hashed table (Weinberger et al. 2009). Only drafts that
    were judged teach: those pruned say nothing, and what was known of them when they were pruned is in the features.
    """

    def __init__(self, draft_length: int) -> None:
        self.judged = 0
        self._constant = np.zeros((draft_length, FEATURES))  # what is the same in every draft of a depth
        self._constant[:, 0], self._constant[:, 5] = 1, np.arange(draft_length) / draft_length
        self._weights: Floats = np.zeros(FEATURES)
        self._information: Floats = np.eye(FEATURES) * PRIOR
        self._slot_weights: FloatArray = np.zeros(1 << SLOT_BITS, np.float32)
        self._slot_information: FloatArray = np.zeros(1 << SLOT_BITS, np.float32)
        # Of each request: how much oftener than expected its latest drafts were accepted, shrunk towards 0, which is
        # how many more over how many judged.
        self._surprises: dict[str, tuple[float, float, float]] = {}
        self._latest: tuple[Draft, _Seen] | None = None  # what was scored is learnt from next
        self._judged: list[_Judged] = []  # steps that nothing has been concluded from
        self._lessons: list[_Lesson] = []  # what was concluded and has not moved the weights

    def log_scores(self, draft: Draft, view: BatchView, rows: IntArray | None) -> FloatArray:
        """Log of the probability that each prefix is accepted: [b, depth + 1], 0 for the anchor, non-increasing.

        draft: of the requests of view at rows [b], None for all. A confidence of 0 or NaN is never accepted.
        """
        seen = self._see(draft, view, rows)
        self._latest = draft, seen
        scores = np.zeros((len(seen.usable), seen.usable.shape[1] + 1), np.float32)
        log_accepted = np.where(seen.usable, -np.logaddexp(0, -seen.log_odds), -np.inf)
        np.cumsum(log_accepted, axis=1, dtype=np.float32, out=scores[:, 1:])
        return scores

    def learn(self, outcome: StepOutcome) -> None:
        """Take up what the target said about the step's drafts, and forget the requests that have left."""
        if outcome.draft is not None and outcome.draft.confidence.size:
            self._judge(outcome.draft, outcome)
        live = outcome.view.request_ids
        self._surprises = {name: self._surprises[name] for name in live if name in self._surprises}

    def _judge(self, draft: Draft, outcome: StepOutcome) -> None:
        rows = outcome.intent.rows
        scored, self._latest = self._latest, None  # what it says is of the weights before
        seen = scored[1] if scored is not None and scored[0] is draft else self._see(draft, outcome.view, rows)
        if self._judged and self._judged[0].seen.usable.shape[1] != seen.usable.shape[1]:
            self._take_up()
        drafted = slice(None) if rows is None else rows
        self._judged.append(_Judged(seen, outcome.accepted[drafted], outcome.judged[drafted]))
        if sum(len(step.judged) for step in self._judged) >= LESSON_BLOCKS:
            self._take_up()

    def _take_up(self) -> None:
        """Compare what the target said about the latest blocks, all of one depth, with what was expected."""
        seen = [step.seen for step in self._judged]
        names = [name for part in seen for name in part.names]
        judged = np.concatenate([step.judged for step in self._judged])
        accepted = np.concatenate([step.accepted for step in self._judged])
        self._judged.clear()
        depths = np.arange(seen[0].usable.shape[1])
        known = (depths < judged[:, None]) & np.concatenate([part.usable for part in seen])
        expected = 1 / (1 + np.exp(-np.concatenate([part.log_odds for part in seen])))
        surprise = np.where(known, (depths < accepted[:, None]) - expected, 0.0)
        # Where it was as good as sure and wrong, the variance alone would let one step go far too wide.
        variance = np.maximum(expected * (1 - expected), np.abs(surprise) / 4)
        features, slots = (np.concatenate(part) for part in zip(*((x.features, x.slots) for x in seen), strict=True))
        self._lessons.append(_Lesson(features[known], slots[known], surprise[known], variance[known]))
        if sum(len(lesson.surprise) for lesson in self._lessons) >= LESSON:
            self._learn_weights()
        self._remember(names, surprise.sum(1), known.sum(1))
        self.judged += int(known.sum())

    def _see(self, draft: Draft, view: BatchView, rows: IntArray | None) -> _Seen:
        names = view.request_ids if rows is None else [view.request_ids[row] for row in rows.tolist()]
        confidence = np.fmin(np.fmax(draft.confidence, CERTAIN), 1 - CERTAIN).astype(np.float64)  # fmax(NaN, c) is c
        logs = np.log(confidence)
        base = logs - np.log1p(-confidence)
        features = np.empty((*base.shape, FEATURES))
        features[:] = self._constant[: base.shape[1]]
        features[..., 1] = base / 4  # about as large as the others
        features[:, 1:, 2] = draft.tokens[:, 1:] == draft.tokens[:, :-1]  # drafted side by side, tokens repeat
        own = [self._surprises[name][0] if name in self._surprises else 0.0 for name in names]
        features[..., 3] = np.array(own)[:, None]
        samples = view.temperatures if rows is None else view.temperatures[rows]
        features[..., 4] = (samples > 0)[:, None]
        if draft.margin is not None:
            second = np.fmax(confidence - draft.margin, CERTAIN)
            features[..., 6] = np.fmin(np.log(second) - logs, 0) / 4  # second to best
        slots = _slots(draft.tokens, view, rows)
        log_odds = base + features @ self._weights + self._slot_weights[slots].sum(axis=-1)
        return _Seen(names, features, slots, log_odds, draft.confidence > 0)

    def _learn_weights(self) -> None:
        """One Newton step of the logistic loss on everything still remembered; the prior never fades."""
        parts = zip(*((part.features, part.slots, part.surprise, part.variance) for part in self._lessons), strict=True)
        features, slots, surprise, variance = (np.concatenate(part) for part in parts)
        self._lessons.clear()
        kept = np.exp(-len(surprise) / MEMORY_DRAFTS)
        self._information *= kept
        self._information += (1 - kept) * PRIOR * np.eye(FEATURES) + (features.T * variance) @ features
        gradient = features.T @ surprise - (1 - kept) * PRIOR * self._weights
        self._weights += np.linalg.solve(self._information, gradient)

        np.add.at(self._slot_information, slots, variance[:, None])
        information = self._slot_information[slots]
        # Each of a draft's slots answers for its share of the surprise, lest together they answer for it twice.
        np.add.at(self._slot_weights, slots, surprise[:, None] / (slots.shape[1] * information + SLOT_PRIOR))
        self._slot_information[slots] = np.minimum(information, SLOT_INFORMATION)

    def _remember(self, names: list[str], surprise: Floats, judged: IntArray) -> None:
        kept = float(np.exp(-1 / OWN_MEMORY_BLOCKS))
        for name, more, count in zip(names, surprise.tolist(), judged.tolist(), strict=True):
            _, beyond, of = self._surprises.get(name, (0.0, 0.0, 0.0))
            beyond, of = beyond * kept + more, of * kept + count
            self._surprises[name] = beyond / (of + OWN_PRIOR), beyond, of


def _slots(tokens: IntArray, view: BatchView, rows: IntArray | None) -> NDArray[np.intp]:
    """Where the weights of each draft's wordings are: [b, d, 2], or [b, d, 0] where nobody knows the words.

    Multiplying each token by its place's odd constant, adding up, and keeping the upper bits spreads evenly.
    """
    if view.last_tokens is None:
        return np.empty((*tokens.shape, 0), np.intp)
    last = view.last_tokens if rows is None else view.last_tokens[rows]
    ids = np.concatenate([last, tokens], axis=1).astype(np.uint64)  # [b, 2 + d]
    pair = ids[:, 2:] * _MIXERS[0] + ids[:, 1:-1] * _MIXERS[1]
    slots = np.empty((*tokens.shape, 2), np.uint64)
    slots[..., 0] = pair
    slots[..., 1] = pair + ids[:, :-2] * _MIXERS[2] + _MIXERS[3]
    slots >>= np.uint64(64 - SLOT_BITS)
    return slots.view(np.intp)
