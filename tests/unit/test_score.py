"""The fitted score: the prefix product until it is taught, then what the drafter, the words and the request show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dcut_server.simulate.quality import auroc, expected_calibration_error
from dcut_trt.spec.score import AcceptanceScore
from dcut_trt.spec.selector import prefix_log_scores
from dcut_trt.stage_types import BatchView, Draft, Intent, StepOutcome

BATCH, LENGTH = 16, 7


class Drafter:
    """Confidences of every size, and blocks whose drafts are accepted as probably as the test says."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def confidence(self) -> np.ndarray:
        return self.random.uniform(0.05, 0.95, (BATCH, LENGTH)).astype(np.float32)

    def outcome(self, draft: Draft, view: BatchView, hazard: np.ndarray, keep: int = LENGTH) -> StepOutcome:
        accepted = np.cumprod(self.random.random(hazard.shape) < hazard, axis=1).sum(axis=1)
        accepted = np.minimum(accepted, keep).astype(np.int32)
        judged = np.minimum(accepted + 1, keep).astype(np.int32)
        kept = np.full(len(hazard), keep, np.int32)
        return StepOutcome(view, Intent(), draft, None, kept, accepted, judged, 0, 0.0, 0.0, 0.0)


def view_of(names: tuple[str, ...], last_tokens: np.ndarray | None = None, temperature: float = 0.0) -> BatchView:
    ones = np.ones(len(names), np.int32)
    return BatchView(names, ones, ones, np.full(len(names), temperature, np.float32), last_tokens)


def draft_of(confidence: np.ndarray, tokens: np.ndarray | None = None) -> Draft:
    if tokens is None:
        tokens = np.tile(np.arange(confidence.shape[1], dtype=np.int32), (len(confidence), 1))
    return Draft(tokens, confidence.astype(np.float32))


NAMES = tuple(f"request-{row}" for row in range(BATCH))
VIEW = view_of(NAMES)


def logistic(log_odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-log_odds))


def hazard_of(score: AcceptanceScore, draft: Draft, view: BatchView) -> np.ndarray:
    return np.exp(np.diff(score.log_scores(draft, view, None).astype(np.float64), axis=1))


@given(arrays(np.float32, (3, 5), elements=st.floats(0, 1, width=32)))
def test_an_untaught_score_is_the_prefix_product(confidence: np.ndarray) -> None:
    scores = AcceptanceScore(5).log_scores(draft_of(confidence), view_of(("a", "b", "c")), None)
    expected = prefix_log_scores(confidence)
    np.testing.assert_array_equal(np.isneginf(scores), np.isneginf(expected))
    # Odds are taken a millionth away from 0 and 1, where rankings do not hang on the rest.
    np.testing.assert_allclose(np.exp(scores), np.exp(expected), atol=1e-5)


messy = st.floats(0, 1, width=32) | st.just(np.float32(np.nan))


@settings(max_examples=60)
@given(st.lists(arrays(np.float32, (4, 3), elements=messy), min_size=1, max_size=6), st.integers(0, 2**31))
def test_scores_never_rise_with_depth_whatever_was_learnt(blocks: list[np.ndarray], seed: int) -> None:
    drafter, score = Drafter(seed), AcceptanceScore(3)
    for confidence in blocks:
        tokens = drafter.random.integers(0, 3, confidence.shape).astype(np.int32)
        last = drafter.random.integers(0, 3, (4, 2)).astype(np.int32)
        view, draft = view_of(("a", "b", "c", "d"), last), draft_of(confidence, tokens)
        scores = score.log_scores(draft, view, None)
        assert scores.shape == (4, 4)
        assert (scores[:, 0] == 0).all()
        assert (scores[:, 1:] <= scores[:, :-1]).all()
        unusable = np.maximum.accumulate(~(confidence > 0), axis=1)
        np.testing.assert_array_equal(np.isneginf(scores[:, 1:]), unusable)
        score.learn(drafter.outcome(draft, view, drafter.random.random((4, 3))))


def test_calibrates_a_drafter_that_is_too_sure() -> None:
    drafter, score = Drafter(), AcceptanceScore(LENGTH)
    said, before, happened = [], [], []
    for step in range(900):
        confidence = drafter.confidence()
        draft = draft_of(confidence)
        outcome = drafter.outcome(draft, VIEW, logistic(0.5 * np.log(confidence / (1 - confidence)) - 1))
        if step >= 200:
            judged = np.arange(LENGTH) < outcome.judged[:, None]
            said.append(hazard_of(score, draft, VIEW)[judged])
            before.append(confidence[judged])
            happened.append((np.arange(LENGTH) < outcome.accepted[:, None])[judged])
        score.learn(outcome)
    accepted = np.concatenate(happened)
    assert expected_calibration_error(np.concatenate(before), accepted) > 0.1
    assert expected_calibration_error(np.concatenate(said), accepted) < 0.02


def test_judged_counts_what_was_learnt_from_and_pruned_drafts_teach_nothing() -> None:
    drafter, score, hidden = Drafter(), AcceptanceScore(LENGTH), AcceptanceScore(LENGTH)
    draft = draft_of(drafter.confidence())
    outcome = drafter.outcome(draft, VIEW, np.full((BATCH, LENGTH), 0.5), keep=3)
    score.learn(outcome)
    assert score.judged == outcome.judged.sum()
    # The same judged drafts, with other ones behind them.
    other = draft_of(np.where(np.arange(LENGTH) < outcome.judged[:, None], draft.confidence, 0.123))
    hidden.learn(replace(outcome, draft=other))
    fresh = draft_of(drafter.confidence())
    np.testing.assert_array_equal(score.log_scores(fresh, VIEW, None), hidden.log_scores(fresh, VIEW, None))
    score.learn(replace(outcome, draft=None))
    assert score.judged == outcome.judged.sum()


def test_learns_which_requests_are_easy() -> None:
    drafter, score = Drafter(), AcceptanceScore(LENGTH)
    easy = np.arange(BATCH) % 2 == 0
    for _ in range(150):
        draft = draft_of(drafter.confidence())
        base = np.log(draft.confidence / (1 - draft.confidence))
        score.learn(drafter.outcome(draft, VIEW, logistic(base + np.where(easy, 1.5, -1.5)[:, None])))
    hazard = hazard_of(score, draft_of(np.full((BATCH, LENGTH), 0.5)), VIEW)[:, 0]
    assert hazard[easy].min() > hazard[~easy].max()
    assert hazard[easy].mean() > hazard[~easy].mean() + 0.25
    strangers = hazard_of(score, draft_of(np.full((BATCH, LENGTH), 0.5)), view_of(tuple("abcdefghijklmnop")))[:, 0]
    assert np.ptp(strangers) == 0


def test_learns_which_wordings_the_target_says() -> None:
    drafter, score = Drafter(), AcceptanceScore(LENGTH)
    said, happened = [], []
    for step in range(200):
        tokens = drafter.random.integers(0, 12, (BATCH, LENGTH)).astype(np.int32)
        last = drafter.random.integers(0, 12, (BATCH, 2)).astype(np.int32)
        view, draft = view_of(NAMES, last), draft_of(np.full((BATCH, LENGTH), 0.5), tokens)
        right = (tokens + np.concatenate([last[:, 1:], tokens[:, :-1]], axis=1)) % 3 > 0
        outcome = drafter.outcome(draft, view, np.where(right, 0.9, 0.1))
        if step >= 150:
            judged = np.arange(LENGTH) < outcome.judged[:, None]
            said.append(hazard_of(score, draft, view)[judged])
            happened.append((np.arange(LENGTH) < outcome.accepted[:, None])[judged])
        score.learn(outcome)
    assert auroc(np.concatenate(said), np.concatenate(happened)) > 0.85


@pytest.mark.parametrize("cause", ["repeated", "deep", "sampled", "contested"])
def test_learns_what_else_makes_a_draft_doubtful(cause: str) -> None:
    drafter, score = Drafter(), AcceptanceScore(LENGTH)
    samples = np.arange(BATCH) % 2 == 0
    view = BatchView(NAMES, VIEW.context_lens, VIEW.pending_rows, samples.astype(np.float32))
    for _ in range(100):
        tokens = drafter.random.integers(0, 3, (BATCH, LENGTH)).astype(np.int32)
        doubtful = {
            "repeated": np.diff(tokens, axis=1, prepend=-1) == 0,
            "deep": np.tile(np.arange(LENGTH) >= LENGTH // 2, (BATCH, 1)),
            "sampled": np.tile(samples[:, None], LENGTH),
            "contested": drafter.random.random((BATCH, LENGTH)) < 0.5,
        }[cause]
        # No request is seen twice, so that nothing is laid to its own record.
        strangers = replace(view, request_ids=tuple(f"{drafter.random.random()}" for _ in NAMES))
        margin = np.where(doubtful, 0.42, 0.69) if cause == "contested" else None
        draft = replace(draft_of(np.full((BATCH, LENGTH), 0.7), tokens), margin=margin)
        score.learn(drafter.outcome(draft, strangers, np.where(doubtful, 0.5, 0.9)))
    hazard = hazard_of(score, draft, view)
    assert hazard[doubtful].mean() < hazard[~doubtful].mean() - 0.2


def test_the_margin_may_be_missing_poisoned_or_more_than_the_confidence() -> None:
    score = AcceptanceScore(4)
    confidence = np.array([[0.5, 0.5, np.nan, 0.5]], np.float32)
    for margin in (None, np.array([[np.nan, 0.9, 0.1, 0.0]], np.float32)):
        draft = replace(draft_of(confidence), margin=margin)
        accepted, judged = np.array([1], np.int32), np.array([2], np.int32)
        view = view_of(("a",))
        score.learn(StepOutcome(view, Intent(), draft, None, judged, accepted, judged, 3, 0.0, 0.0, 0.0))
        scores = score.log_scores(draft, view, None)
        assert np.isfinite(scores[0, :3]).all()
        assert np.isneginf(scores[0, 3:]).all()
        assert (np.diff(scores[0, :3]) <= 0).all()


def test_a_wording_follows_a_change() -> None:
    drafter, score = Drafter(), AcceptanceScore(1)
    last = np.stack([np.arange(BATCH), np.arange(BATCH) + 100], axis=1).astype(np.int32)
    draft = draft_of(np.full((BATCH, 1), 0.5))
    odd = np.arange(BATCH)[:, None] % 2 == 1
    for right in (odd, ~odd):
        for step in range(300):
            names = tuple(f"{step}-{row}" for row in range(BATCH))
            score.learn(drafter.outcome(draft, view_of(names, last), np.where(right, 0.9, 0.1), keep=1))
        hazard = hazard_of(score, draft, view_of(NAMES, last))
        assert hazard[right].min() > 0.65
        assert hazard[~right].max() < 0.35


def test_a_drafter_that_is_always_sure_and_mostly_wrong_does_not_throw_it_off() -> None:
    drafter, score = Drafter(), AcceptanceScore(LENGTH)
    draft = draft_of(np.ones((BATCH, LENGTH)))
    for _ in range(100):
        score.learn(drafter.outcome(draft, VIEW, np.full((BATCH, LENGTH), 0.3)))
        hazard = hazard_of(score, draft, view_of(tuple("abcdefghijklmnop")))[0, 0]
        assert hazard > 0.2  # one step too far, and nothing would be verified that could teach it better
    assert hazard == pytest.approx(0.3, abs=0.1)


@pytest.mark.parametrize("words", [True, False])
def test_one_wording_in_all_drafts_of_all_steps_stays_calm(words: bool) -> None:
    """Every draft of a step falls into the same slots: their steps together must not overshoot."""
    drafter, score = Drafter(), AcceptanceScore(LENGTH)
    view = view_of(NAMES, np.zeros((BATCH, 2), np.int32) if words else None)
    draft = draft_of(np.full((BATCH, LENGTH), 0.9), np.zeros((BATCH, LENGTH), np.int32))
    hazards = []
    for _ in range(200):
        score.learn(drafter.outcome(draft, view, np.full((BATCH, LENGTH), 0.4)))
        hazards.append(hazard_of(score, draft, view)[:, 0].mean())
    assert abs(np.array(hazards[50:]) - 0.4).max() < 0.2


def test_follows_a_shift_of_the_drafter() -> None:
    drafter, score = Drafter(), AcceptanceScore(LENGTH)
    draft = draft_of(np.full((BATCH, LENGTH), 0.5))
    for hazard in (0.8, 0.2):
        for step in range(1200):
            # New requests each time, so that nothing hangs on a request's own record.
            view = view_of(tuple(f"{hazard}-{step}-{row}" for row in range(BATCH)))
            score.learn(drafter.outcome(draft, view, np.full((BATCH, LENGTH), hazard)))
        assert hazard_of(score, draft, view_of(NAMES))[0, 0] == pytest.approx(hazard, abs=0.05)


def test_a_request_that_left_is_forgotten_and_one_that_paused_is_not() -> None:
    drafter, score, patient = Drafter(), AcceptanceScore(LENGTH), AcceptanceScore(LENGTH)
    for step in range(50):
        names = tuple(f"request-{row + step}" for row in range(BATCH))
        draft = draft_of(drafter.confidence())
        score.learn(drafter.outcome(draft, view_of(names), np.full((BATCH, LENGTH), 0.5)))
        assert set(score._surprises) == set(names)
    outcome = drafter.outcome(draft_of(drafter.confidence()), VIEW, np.full((BATCH, LENGTH), 0.9))
    patient.learn(outcome)
    known = dict(patient._surprises)
    patient.learn(replace(outcome, draft=None))  # a step without drafts: all of them are still there
    assert patient._surprises == known
    patient.learn(replace(outcome, draft=None, view=view_of(NAMES[:3])))
    assert set(patient._surprises) == set(NAMES[:3])


def test_rows_are_those_of_the_requests_that_drafted() -> None:
    drafter, whole, part = Drafter(), AcceptanceScore(LENGTH), AcceptanceScore(LENGTH)
    rows = np.array([1, 4, 9], np.int32)
    last = np.zeros((BATCH, 2), np.int32)
    last[1] = last[4] = (7, 8)
    view = BatchView(NAMES, VIEW.context_lens, VIEW.pending_rows, (np.arange(BATCH) % 2).astype(np.float32), last)
    few = BatchView(
        tuple(NAMES[row] for row in rows), rows, rows, view.temperatures[rows], np.ascontiguousarray(last[rows])
    )
    for _ in range(20):
        draft = draft_of(drafter.confidence()[rows, :4])
        outcome = drafter.outcome(draft, few, np.array([[0.9], [0.6], [0.3]]) * np.ones(4), keep=4)
        whole.learn(outcome)
        spread = {name: np.zeros(BATCH, np.int32) for name in ("keep", "accepted", "judged")}
        for name, values in spread.items():
            values[rows] = getattr(outcome, name)
        part.learn(replace(outcome, view=view, intent=Intent(depth=4, rows=rows), **spread))
    np.testing.assert_array_equal(part.log_scores(draft, view, rows), whole.log_scores(draft, few, None))
    assert part.judged == whole.judged > 0
