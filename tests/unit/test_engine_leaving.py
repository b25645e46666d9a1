"""Requests that break, are cancelled or run out of time: they leave at once, and nobody else notices."""

from __future__ import annotations

from copy import deepcopy
from itertools import count
from typing import Any

import numpy as np
import pytest
from scripted_runs import POLICIES, checked_step, expected, letters, letters_script, requests, run_all

from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import DeadlineExceeded, StepFailed
from dcut_trt.stage_types import Draft, DraftInput
from dcut_trt.types import FinishReason, Request, SamplingParams


@pytest.mark.parametrize("policy", ["plain", "dflash", "ratio:0.5"])
@pytest.mark.parametrize("offset", [0, 1, 2, 9])
def test_a_row_of_nan_fails_its_request_alone(policy: str, offset: int) -> None:
    script = deepcopy(letters_script(1e9))
    poisoned = Request("poisoned", letters("poison me"), 40, SamplingParams(1.0, seed=9))
    tokens, _, _ = expected(script, poisoned)
    script.logits[script.state([*poisoned.prompt_ids, *tokens[:offset]])] = np.nan
    neighbours = [Request(f"n{index}", letters(f"n{index}"), 40, SamplingParams(1.0, seed=index)) for index in range(4)]
    streams = run_all(scripted_engine(policy, script=script), neighbours[0], poisoned, *neighbours[1:])
    assert isinstance(streams["poisoned"].error, StepFailed)
    assert "not finite" in str(streams["poisoned"].error)
    assert streams["poisoned"].tokens == tokens[: len(streams["poisoned"].tokens)]
    for request in neighbours:
        assert streams[request.request_id].outcome == expected(script, request)


def test_a_request_that_breaks_while_it_is_committed_fails_alone() -> None:
    script = letters_script(1e9)
    engine = scripted_engine("dflash", script=script)
    crowd = requests(3)
    decode, calls = engine.tokenizer.decode, count()

    def break_once(ids: list[int], **options: bool) -> str:
        if next(calls) == 10:
            raise ZeroDivisionError
        return decode(ids, **options)

    engine.tokenizer.decode = break_once  # type: ignore[method-assign,assignment]
    streams = run_all(engine, *crowd)
    (broken,) = [name for name, stream in streams.items() if stream.error is not None]
    assert isinstance(streams[broken].error, StepFailed)
    assert broken in str(streams[broken].error)
    assert "ZeroDivisionError" in str(streams[broken].error)
    for request in crowd:
        if request.request_id != broken:
            assert streams[request.request_id].outcome == expected(script, request)


class NanDrafter:
    """Confidence NaN for the first request of every batch."""

    network_ms = 0.0

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def propose(self, drafts: DraftInput) -> Draft:
        draft = self._inner.propose(drafts)
        draft.confidence[0] = np.nan
        return Draft(draft.tokens, draft.confidence)

    def close(self) -> None: ...


@pytest.mark.parametrize("policy", POLICIES)
def test_a_drafter_that_says_nan_changes_no_output(policy: str) -> None:
    script = letters_script()
    engine = scripted_engine(policy, script=script)
    engine.drafter = NanDrafter(engine.drafter)
    crowd = requests(4)
    streams = run_all(engine, *crowd)
    for request in crowd:
        assert streams[request.request_id].outcome == expected(script, request)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_request_leaves_within_one_step(steps: int) -> None:
    """Queued, in the middle of its prompt, after its first token, and while it decodes."""
    engine = scripted_engine(prefill_chunk=4, mean_length=1e9)
    engine.submit(Request("r", letters("abcdefg"), 100))
    for _ in range(steps):
        checked_step(engine)
    assert engine.cancel("r")
    events = checked_step(engine)
    assert [(event.request_id, event.finish) for event in events] == [("r", FinishReason.ABORTED)]
    assert (engine.running, engine.waiting, engine.has_work) == (0, 0, False)
    assert engine.free_blocks == engine.scheduler.pool.num_blocks
    assert not engine.cancel("r")


def test_an_id_can_be_used_again_after_a_cancel() -> None:
    script = letters_script()
    engine = scripted_engine(script=script)
    for text in ("first", "second", "third"):
        request = Request("same", letters(text), 30)
        engine.submit(request)
        checked_step(engine)
        engine.cancel("same")
        checked_step(engine)
    final = Request("same", letters("final"), 30)
    assert run_all(engine, final)["same"].outcome == expected(script, final)


def test_a_cancel_that_comes_as_the_request_ends_does_not_hit_the_next_one_of_its_id() -> None:
    script = letters_script()
    engine = scripted_engine(script=script)
    propose = engine.drafter.propose

    def cancel_meanwhile(drafts: DraftInput) -> Draft:
        engine.cancel("same")
        return propose(drafts)

    engine.drafter.propose = cancel_meanwhile  # type: ignore[method-assign]
    engine.submit(Request("same", letters("a"), 2))
    checked_step(engine)
    assert checked_step(engine)[0].finish is not None
    engine.drafter.propose = propose  # type: ignore[method-assign]
    again = Request("same", letters("b"), 20)
    assert run_all(engine, again)["same"].outcome == expected(script, again)


def test_a_passed_deadline_ends_a_running_request_and_a_queued_one_never_runs() -> None:
    engine = scripted_engine("plain", max_batch=1, mean_length=1e9)
    engine.clock = lambda: 0.5 * engine.trace.totals.steps
    running = Request("running", letters("a"), 200, deadline=5.0)
    queued = Request("queued", letters("bc"), 200, deadline=2.0)
    streams = run_all(engine, running, queued)
    for stream in streams.values():
        assert isinstance(stream.error, DeadlineExceeded)
    assert len(streams["running"].tokens) == 10  # one per half second
    assert "10 output tokens" in str(streams["running"].error)
    assert not streams["queued"].tokens
    assert engine.trace.totals.prompt_tokens == 1
