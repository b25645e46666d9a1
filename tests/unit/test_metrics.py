"""What a step record and the totals say."""

from __future__ import annotations

from contextlib import suppress

import pytest

from dcut_trt.metrics import StepTrace
from dcut_trt.types import Commit, FinishReason


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def commit(tokens: int, drafted: int, verified: int, accepted: int, finish: FinishReason | None = None) -> Commit:
    return Commit("r", (1,) * tokens, "", finish, drafted, verified, accepted)


def test_stages_add_up_within_a_step_and_start_anew_with_the_next() -> None:
    clock = Clock()
    trace = StepTrace(lambda: clock.now * 250, clock)  # the networks take a quarter of all time
    for _ in range(2):
        trace.start()
        for name, seconds in (("draft", 1.0), ("select", 2.0), ("draft", 4.0), ("verify", 8.0)):
            with trace.stage(name):  # type: ignore[arg-type]
                clock.now += seconds
        clock.now += 1.0
        trace.finish("decode", [], 1, 8, 8, 1.0)
    for record in trace.records:
        assert (record.draft_ms, record.select_ms, record.verify_ms) == pytest.approx((5000, 2000, 8000))
        assert (record.step_ms, record.network_ms, record.host_ms) == pytest.approx((16000, 4000, 12000))


def test_a_stage_that_raises_is_still_timed() -> None:
    clock = Clock()
    trace = StepTrace(lambda: 0.0, clock)
    trace.start()
    with suppress(ZeroDivisionError), trace.stage("draft"):
        clock.now += 3.0
        raise ZeroDivisionError
    trace.finish("decode", [], 1, 1, 1, None)
    assert trace.records[-1].draft_ms == pytest.approx(3000)


def test_counts_derive_from_commits() -> None:
    trace = StepTrace(lambda: 0.0)
    trace.start()
    trace.finish("prefill", [commit(1, 0, 0, 0)], 2, 40, 40, None)
    trace.start()
    trace.finish("decode", [commit(4, 7, 5, 3), commit(1, 7, 0, 0, FinishReason.STOP)], 2, 7, 16, 0.5)
    record = trace.records[-1]
    assert (record.batch, record.rows, record.possible, record.kept, record.accepted, record.emitted) == (
        2, 7, 16, 5, 3, 5,
    )  # fmt: skip
    totals = trace.totals
    assert (totals.steps, totals.prompt_tokens, totals.output_tokens, totals.requests_finished) == (2, 40, 6, 1)
    assert (totals.drafted, totals.verified, totals.accepted) == (14, 5, 3)


def test_accepted_drafts_per_request_leave_out_blocks_that_ended_with_their_request() -> None:
    trace = StepTrace(lambda: 0.0)
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    whole, ends_after_bonus = commit(4, 7, 7, 3), commit(3, 7, 7, 2, length)
    cut_at_a_draft, nothing_accepted = commit(5, 7, 7, 5, stop), commit(1, 7, 7, 0, stop)
    trace.start()
    trace.finish("decode", [whole, ends_after_bonus, cut_at_a_draft, nothing_accepted], 4, 32, 32, 1.0)
    assert trace.records[-1].accepted_each == (3, 2, 0)
    assert trace.records[-1].accepted == 10
    trace.start()
    trace.finish("prefill", [commit(1, 0, 0, 0)], 1, 5, 5, None)
    assert trace.records[-1].accepted_each == ()


def test_reset_forgets() -> None:
    trace = StepTrace(lambda: 0.0)
    trace.start()
    trace.finish("decode", [commit(1, 0, 0, 0)], 1, 1, 8, None)
    trace.reset()
    assert not trace.records
    assert trace.totals.steps == trace.totals.output_tokens == 0
