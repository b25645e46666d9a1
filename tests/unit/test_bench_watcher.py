"""What the bench learns by looking over a policy's shoulder, against the same counted one position at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_server.bench.confidence import CALIBRATION_BINS, confidence_of, reliability
from dcut_server.bench.watcher import Watched, Watcher
from dcut_trt.spec.policy import Steady
from dcut_trt.spec.rules import FixedDepth, Plain
from dcut_trt.stage_types import BatchView, Draft, Intent, Selection, StepOutcome

DEPTH = 5


@st.composite
def watched_steps(draw) -> list[Watched]:
    """Steps as an engine leaves them: a rejection judges one position more than was accepted."""
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        batch, depth = draw(st.integers(1, 4)), draw(st.integers(1, DEPTH))
        keep = np.array([draw(st.integers(0, depth)) for _ in range(batch)], np.int32)
        accepted = np.array([draw(st.integers(0, kept)) for kept in keep.tolist()], np.int32)
        answered = np.array([draw(st.booleans()) for _ in range(batch)])
        shares = st.lists(st.sampled_from((0.05, 0.3, 0.5, 0.9, 1.0)), min_size=depth, max_size=depth)
        confidence = np.array([draw(shares) for _ in range(batch)], np.float32)
        scores = np.concatenate([np.zeros((batch, 1)), np.cumsum(np.log(confidence), axis=1)], axis=1)
        log_scores = scores.astype(np.float32) if draw(st.booleans()) else None
        steps.append(Watched(depth, keep, accepted, np.minimum(keep, accepted + answered), confidence, log_scores))
    return steps


def positions(steps: list[Watched]) -> list[tuple[float, bool]]:
    """Prefix product and outcome of every kept position that is settled."""
    found = []
    for step in steps:
        for keep, accepted, judged, confidence in zip(
            step.keep, step.accepted, step.judged, step.confidence, strict=True
        ):
            rejected, finished = judged > accepted, judged == keep
            product = 1.0
            for place in range(keep if rejected or finished else 0):
                product *= float(confidence[place])
                found.append((product, bool(place < accepted)))
    return found


@given(watched_steps())
def test_the_statistics_equal_those_counted_one_by_one(steps):
    found = confidence_of(steps)
    longest = max(step.depth for step in steps)
    for name, limit in (("drafted", "depth"), ("kept", "keep"), ("accepted", "accepted")):
        assert getattr(found, name) == tuple(
            sum(
                int(place < (step.depth if limit == "depth" else getattr(step, limit)[row]))
                for step in steps
                for row in range(len(step.keep))
            )
            for place in range(longest)
        )
    settled = positions(steps)
    if not settled:
        assert found.prefix_product is None
        return
    product = found.prefix_product
    for number in range(CALIBRATION_BINS):
        held = [pair for pair in settled if min(int(pair[0] * CALIBRATION_BINS), CALIBRATION_BINS - 1) == number]
        assert product.count[number] == len(held)
        if held:
            assert product.predicted[number] == pytest.approx(sum(said for said, _ in held) / len(held))
            assert product.accepted[number] == pytest.approx(sum(seen for _, seen in held) / len(held))
        else:
            assert product.predicted[number] is product.accepted[number] is None
    pairs = [(good, bad) for good, hit in settled if hit for bad, other in settled if not other]
    if pairs:
        wins = sum(1.0 if good > bad else 0.5 if good == bad else 0.0 for good, bad in pairs)
        assert product.auroc == pytest.approx(wins / len(pairs))
    else:
        assert product.auroc is None


def test_a_score_is_judged_at_the_same_positions_as_the_product():
    scored = [Watched(2, *two(2), *two(1), *two(2), np.full((1, 2), 0.5, np.float32), np.log([[1.0, 0.9, 0.1]]))]
    found = confidence_of(scored)
    assert sum(found.score.count) == sum(found.prefix_product.count) == 2
    assert found.score.ece == pytest.approx(0.1)
    assert found.prefix_product.ece == pytest.approx((0.5 + 0.25) / 2)


def test_drafts_that_the_host_did_not_see_are_counted_all_the_same():
    found = confidence_of([Watched(3, *two(2), *two(1), *two(2), None, None)])
    assert (found.drafted, found.kept, found.accepted) == ((1, 1, 1), (1, 1, 0), (1, 0, 0))
    assert found.prefix_product is found.score is None
    assert confidence_of([]) is None


def test_a_probability_a_little_above_one_stays_in_the_last_bin():
    above = np.full((1, 1), 1.0000001, np.float32)
    found = confidence_of([Watched(1, *two(1), *two(1), *two(1), above, None)]).prefix_product
    assert found.predicted[-1] == 1.0
    assert reliability(np.array([1.0, 0.0]), np.array([True, False])).auroc == 1.0


class Learner(Steady):
    """Drafts two tokens for the second request only, and counts what it was shown."""

    name = "learner"
    learns = True

    def __init__(self) -> None:
        self.seen: list[StepOutcome] = []

    def intend(self, view: BatchView) -> Intent:
        return Intent(2, np.array([1], np.int32))

    def select(self, draft: Draft, view: BatchView) -> Selection:
        return Selection(np.array([1], np.int32), 0.25, np.zeros((1, 3), np.float32))

    def offer(self, batch: int) -> None:
        return None

    def observe(self, outcome: StepOutcome) -> None:
        self.seen.append(outcome)


def test_a_watcher_hands_everything_through_and_keeps_copies():
    learner = Learner()
    watcher = Watcher(learner, DEPTH)
    view = BatchView(("a", "b"), *(np.zeros(2, np.int32) for _ in range(2)), np.zeros(2, np.float32))
    draft = Draft(np.zeros((1, 2), np.int32), np.full((1, 2), 0.5, np.float32))
    intent, selection = watcher.intend(view), watcher.select(draft, view)
    keep, accepted = np.array([0, 1], np.int32), np.array([0, 1], np.int32)
    outcome = StepOutcome(view, intent, draft, selection, keep, accepted, accepted, 3, 1.0, 1.0, 3.0)
    watcher.observe(outcome)
    assert (watcher.name, watcher.drafts, watcher.learns) == ("learner", True, True)
    assert learner.seen == [outcome]
    draft.confidence[:], keep[:] = 0.0, 0
    (taken,) = watcher.take()
    assert (taken.depth, taken.keep.tolist(), taken.accepted.tolist()) == (2, [1], [1])
    assert taken.confidence.tolist() == [[0.5, 0.5]]
    assert watcher.take() == ()


@pytest.mark.parametrize(("rule", "drafted"), [(FixedDepth(), DEPTH), (Plain(), None)])
def test_a_whole_block_is_as_deep_as_the_networks_draft_and_no_block_is_nothing(rule, drafted):
    watcher = Watcher(rule, DEPTH)
    view = BatchView(("a",), *(np.zeros(1, np.int32) for _ in range(2)), np.zeros(1, np.float32))
    nothing = np.zeros(1, np.int32)
    watcher.observe(StepOutcome(view, rule.intend(view), None, None, nothing, nothing, nothing, 1, 0.0, 1.0, 1.0))
    assert [watched.depth for watched in watcher.take()] == ([] if drafted is None else [drafted])


def two(value: int) -> tuple[np.ndarray]:
    return (np.array([value], np.int32),)
