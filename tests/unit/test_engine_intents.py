"""Policies that let some draft and others not, and to any depth: the text stays, and what they are told is true."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_inputs import view_of
from scripted_runs import checked_step, expected, letters, letters_script, requests, run_all

from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.spec.policy import NO_DRAFT
from dcut_trt.stage_types import BatchView, Draft, Intent, Offer, Selection, StepOutcome
from dcut_trt.step_values import drafted_each, for_whole_batch, split
from dcut_trt.types import Request, SamplingParams

DRAFT_LENGTH = 7


class Wandering:
    """Anybody drafts to any depth, and any number of drafts is kept; remembers what it was told."""

    name = "wandering"
    drafts = True
    learns = True

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.outcomes: list[StepOutcome] = []
        self.asked: tuple[BatchView, Intent] | None = None

    def intend(self, view: BatchView) -> Intent:
        depth = int(self.random.integers(0, DRAFT_LENGTH + 1))
        rows = np.flatnonzero(self.random.random(view.batch) < 0.6).astype(np.int32)
        whole = self.random.random() < 0.3 or len(rows) == 0
        intent = NO_DRAFT if depth == 0 else Intent(depth, None if whole else rows)
        self.asked = view, intent
        return intent

    def select(self, draft: Draft, view: BatchView) -> Selection:
        assert self.asked is not None
        intent = self.asked[1]
        assert draft.confidence.shape == (view.batch if intent.rows is None else len(intent.rows), intent.depth)
        keep = self.random.integers(0, draft.confidence.shape[1] + 1, len(draft.confidence)).astype(np.int32)
        return Selection(keep, None)

    def offer(self, batch: int) -> Offer | None:
        return None

    def observe(self, outcome: StepOutcome) -> None:
        assert (outcome.view, outcome.intent) == self.asked
        self.outcomes.append(outcome)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_text_is_the_same_whoever_drafts_how_far(seed: int, accuracy: float) -> None:
    script = letters_script()
    policy = Wandering(seed)
    engine = scripted_engine(policy, script=script, accuracy=accuracy, prefill_chunk=8, seed=seed % 1000)
    crowd = [*requests(6), Request("sampled", letters("some prompt"), 40, SamplingParams(1.0, seed=3))]
    streams = run_all(engine, *crowd)
    for request in crowd:
        assert streams[request.request_id].outcome == expected(script, request)
    for outcome in policy.outcomes:
        assert outcome.rows == outcome.view.batch + outcome.keep.sum()
        assert (outcome.accepted <= outcome.judged).all()
        assert (outcome.judged <= np.minimum(outcome.keep, outcome.accepted + 1)).all()
        assert outcome.step_ms >= outcome.draft_ms + outcome.verify_ms
    totals = engine.trace.totals
    assert totals.accepted == sum(int(outcome.accepted.sum()) for outcome in policy.outcomes)
    assert totals.verified == sum(int(outcome.keep.sum()) for outcome in policy.outcomes)
    assert totals.drafted == sum(
        sum(drafted_each(outcome.intent, outcome.view.batch, DRAFT_LENGTH)) for outcome in policy.outcomes
    )


class KeepAll(Wandering):
    """Verifies the whole block of all."""

    def intend(self, view: BatchView) -> Intent:
        self.asked = view, Intent()
        return Intent()

    def select(self, draft: Draft, view: BatchView) -> Selection:
        return Selection(np.full(len(draft.tokens), draft.tokens.shape[1], np.int32), 1.0)


@pytest.mark.parametrize(("accuracy", "accepted", "judged"), [(0.0, 0, 1), (1.0, 7, 7)])
def test_what_is_known_of_drafts_after_a_step(accuracy: float, accepted: int, judged: int) -> None:
    policy = KeepAll(0)
    engine = scripted_engine(policy, accuracy=accuracy, script=letters_script(1e9))
    engine.submit(Request("r", letters("abc"), 40, ignore_eos=True))
    while engine.has_work:
        checked_step(engine)
    *before, last = policy.outcomes
    assert {(int(outcome.accepted[0]), int(outcome.judged[0])) for outcome in before} == {(accepted, judged)}
    # 40 = 1 of the prompt + 4 * 8 + 7: the last step ends within its accepted drafts, and none was refused.
    assert (int(last.accepted[0]), int(last.judged[0])) == ((7, 7) if accepted else (0, 1))


def test_features_of_those_that_do_not_draft_do_not_pile_up() -> None:
    class FirstOnly(Wandering):
        def intend(self, view: BatchView) -> Intent:
            self.asked = view, Intent(2, np.array([0], np.int32))
            return self.asked[1]

    engine = scripted_engine(FirstOnly(0), prefill_chunk=16, script=letters_script(1e9), accuracy=0.0)
    for name in "ab":
        engine.submit(Request(name, letters(name), 100, ignore_eos=True))
    most = 0
    while engine.has_work:
        checked_step(engine)
        most = max([most, *(sequence.pending_rows for sequence in engine.scheduler.running)])
    assert 8 <= most <= 17


def test_rows_of_a_part_of_the_batch() -> None:
    rows = np.array([1, 3], np.int32)
    assert for_whole_batch(np.array([5, 6], np.int32), rows, 4).tolist() == [0, 5, 0, 6]
    assert for_whole_batch(np.array([[1, 2], [3, 4]], np.int32), rows, 4).tolist() == [[0, 0], [1, 2], [0, 0], [3, 4]]
    assert drafted_each(Intent(2, rows), 4, 7) == [0, 2, 0, 2]
    assert drafted_each(Intent(), 3, 7) == [7, 7, 7]
    assert split("abcd", Intent(1, rows)) == (["b", "d"], ["a", "c"])  # type: ignore[arg-type]
    assert view_of(3).batch == 3
