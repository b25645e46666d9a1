"""The probability that a draft and all before it are accepted, learnt from the drafts that were judged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcut_trt.stage_types import BatchView, Draft, StepOutcome
from dcut_trt.types import FloatArray, IntArray

Floats = NDArray[np.float64]

CERTAIN = 1e-6  # confidence is kept this far from 0 and 1 where its odds are taken
LESSON = 24  # judged drafts that are learnt from at once: a step of a small batch judges a few, and would pay for each
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
    """What the model sees in drafts [b, d], and what it says. features: [b, d, FEATURES].  slots: [b, d, 2 or 0].

    log_odds: [b, d].  usable: [b, d] False where a draft cannot be accepted.
    """

    features: Floats
    slots: NDArray[np.intp]
    log_odds: Floats
    usable: NDArray[np.bool_]


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
        self._draft_length = draft_length
        self._weights: Floats = np.zeros(FEATURES)
        self._information: Floats = np.eye(FEATURES) * PRIOR
        self._slot_weights: FloatArray = np.zeros(1 << SLOT_BITS, np.float32)
        self._slot_information: FloatArray = np.zeros(1 << SLOT_BITS, np.float32)
        self._surprises: dict[str, tuple[float, float]] = {}  # of each request: accepted beyond expectation, judged
        self._latest: tuple[Draft, _Seen] | None = None  # what was scored is learnt from next
        self._lessons: list[_Lesson] = []  # of steps that have not been learnt from

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
        view, draft = outcome.view, outcome.draft
        if draft is not None and draft.confidence.size:
            rows = np.arange(view.batch, dtype=np.int32) if outcome.intent.rows is None else outcome.intent.rows
            scored, self._latest = self._latest, None  # what it says is of the weights before
            seen = scored[1] if scored is not None and scored[0] is draft else self._see(draft, view, rows)
            depths = np.arange(draft.confidence.shape[1])
            known = (depths < outcome.judged[rows, None]) & seen.usable
            accepted = depths < outcome.accepted[rows, None]
            expected = 1 / (1 + np.exp(-seen.log_odds))
            surprise = np.where(known, accepted - expected, 0.0)
            # Where it was as good as sure and wrong, the variance alone would let one step go far too wide.
            variance = np.maximum(expected * (1 - expected), np.abs(surprise) / 4)
            self._lessons.append(_Lesson(seen.features[known], seen.slots[known], surprise[known], variance[known]))
            if sum(len(lesson.surprise) for lesson in self._lessons) >= LESSON:
                self._learn_weights()
            self._remember([view.request_ids[row] for row in rows.tolist()], surprise.sum(1), known.sum(1))
            self.judged += int(known.sum())
        self._surprises = {name: self._surprises[name] for name in view.request_ids if name in self._surprises}

    def _see(self, draft: Draft, view: BatchView, rows: IntArray | None) -> _Seen:
        names = view.request_ids if rows is None else [view.request_ids[row] for row in rows.tolist()]
        confidence = np.fmin(np.fmax(draft.confidence, CERTAIN), 1 - CERTAIN).astype(np.float64)  # fmax(NaN, c) is c
        base = np.log(confidence) - np.log1p(-confidence)
        features = np.zeros((*base.shape, FEATURES))
        features[..., 0] = 1
        features[..., 1] = base / 4  # about as large as the others
        features[:, 1:, 2] = draft.tokens[:, 1:] == draft.tokens[:, :-1]  # drafted side by side, tokens repeat
        features[..., 3] = self._own(names)[:, None]
        samples = view.temperatures if rows is None else view.temperatures[rows]
        features[..., 4] = (samples > 0)[:, None]
        features[..., 5] = np.arange(base.shape[1]) / self._draft_length
        if draft.margin is not None:
            features[..., 6] = np.log(np.fmin(np.fmax(1 - draft.margin / confidence, CERTAIN), 1)) / 4  # second to best
        slots = _slots(draft.tokens, view, rows)
        log_odds = base + features @ self._weights + self._slot_weights[slots].sum(axis=-1)
        return _Seen(features, slots, log_odds, draft.confidence > 0)

    def _own(self, names: tuple[str, ...] | list[str]) -> Floats:
        """How much oftener than expected each request's latest drafts were accepted, shrunk towards 0: [b]."""
        records = np.array([self._surprises.get(name, (0.0, 0.0)) for name in names]).reshape(-1, 2)
        own: Floats = records[:, 0] / (records[:, 1] + OWN_PRIOR)
        return own

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
            before, of = self._surprises.get(name, (0.0, 0.0))
            self._surprises[name] = (before * kept + more, of * kept + count)


def _slots(tokens: IntArray, view: BatchView, rows: IntArray | None) -> NDArray[np.intp]:
    """Where the weights of each draft's wordings are: [b, d, 2], or [b, d, 0] where nobody knows the words.

    Multiplying each token by its place's odd constant, adding up, and keeping the upper bits spreads evenly.
    """
    if view.last_tokens is None:
        return np.empty((*tokens.shape, 0), np.intp)
    last = view.last_tokens if rows is None else view.last_tokens[rows]
    ids = np.concatenate([last, tokens], axis=1).astype(np.uint64)  # [b, 2 + d]
    pair = ids[:, 2:] * _MIXERS[0] + ids[:, 1:-1] * _MIXERS[1]
    three = pair + ids[:, :-2] * _MIXERS[2] + _MIXERS[3]
    return (np.stack([pair, three], axis=-1) >> np.uint64(64 - SLOT_BITS)).astype(np.intp)
