"""The engine over the scripted model: whatever is speculated, every request gives what it gives alone."""

from __future__ import annotations

from copy import deepcopy
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_runs import (
    EOS,
    LETTERS,
    TOKENIZER,
    Streams,
    checked_step,
    expected,
    letters_script,
    run,
    run_all,
    run_alone,
)

from dcut_trt.backends.scripted import Script, scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.errors import DeadlineExceeded, StepFailed, UnsupportedOption
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.policies import DCut, Policy, make_policy
from dcut_trt.types import Draft, DraftInput, FinishReason, Request, SamplingParams

MAX_LEN = 96
RATIOS = (0.25, 0.5, 0.75, 1.0)
POLICIES = ["plain", "dflash", "ratio:0.25", "ratio:0.5", "ratio:0.75", "ratio:1"]


def cost_tables() -> st.SearchStrategy[CostTable]:
    costs = st.lists(st.floats(1, 20), min_size=12, max_size=12)
    return costs.map(
        lambda values: CostTable((1, 4, 8), RATIOS, np.array(values).reshape(3, 4), np.ones(3), "here", "now")
    )


policies: st.SearchStrategy[Policy] = st.one_of(
    st.sampled_from(POLICIES).map(lambda name: make_policy(name, None)), cost_tables().map(DCut)
)
samplings = st.one_of(
    st.just(SamplingParams()),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.7, 1.0]),
        top_k=st.sampled_from([0, 2]),
        top_p=st.sampled_from([1.0, 0.9]),
        seed=st.integers(0, 2**63 - 1),
    ),
)


@st.composite
def crowds(draw: st.DrawFn) -> tuple[dict[int, list[Request]], dict[int, list[str]]]:
    """Requests by the step they arrive at, and ids by the step they are cancelled at."""
    arrivals: dict[int, list[Request]] = {}
    cancels: dict[int, list[str]] = {}
    for index in range(draw(st.integers(1, 12))):
        request = Request(
            f"r{index}",
            tuple(draw(st.lists(st.integers(0, 257), min_size=1, max_size=40))),
            draw(st.integers(1, 60)),
            draw(samplings),
            tuple(draw(st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=2))),
            ignore_eos=draw(st.booleans()),
        )
        arrival = draw(st.integers(0, 12))
        arrivals.setdefault(arrival, []).append(request)
        if draw(st.sampled_from([False, False, False, True])):
            cancels.setdefault(arrival + draw(st.integers(0, 8)), []).append(request.request_id)
    return arrivals, cancels


@settings(max_examples=80)
@given(
    crowds(),
    policies,
    st.integers(1, 8),
    st.sampled_from([1, 3, 7]),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from([5, 16, 64]),
    st.booleans(),
)
def test_every_request_gives_what_it_gives_alone(
    crowd: tuple[dict[int, list[Request]], dict[int, list[str]]],
    policy: Policy,
    max_batch: int,
    draft_length: int,
    accuracy: float,
    prefill_chunk: int,
    scarce: bool,
) -> None:
    script = letters_script()
    arrivals, cancels = crowd
    engine = scripted_engine(
        policy,
        script=script,
        max_batch=max_batch,
        max_len=MAX_LEN,
        draft_length=draft_length,
        block_size=8,
        num_blocks=14 if scarce else None,  # enough for one longest request
        accuracy=accuracy,
        prefill_chunk=prefill_chunk,
    )
    streams = run(engine, arrivals, cancels)
    for requests in arrivals.values():
        for request in requests:
            check_stream(streams, request, script)
    check_totals(engine, streams)


def check_stream(streams: Streams, request: Request, script: Script) -> None:
    stream = streams[request.request_id]
    tokens, text, finish = expected(script, request, MAX_LEN)
    if stream.finish is FinishReason.ABORTED:
        assert stream.tokens == tokens[: len(stream.tokens)]
        assert text.startswith(stream.text)
    else:
        assert stream.outcome == (tokens, text, finish)
    assert stream.error is None
    assert stream.usage is not None
    assert stream.usage.output_tokens == len(stream.tokens)
    assert stream.usage.accepted <= stream.usage.verified <= stream.usage.drafted


def check_totals(engine: Engine, streams: Streams) -> None:
    """The metrics count what the streams carried, and nothing past an end."""
    usages = [stream.usage for stream in streams.values() if stream.usage is not None]
    totals = engine.trace.totals
    assert totals.output_tokens == sum(usage.output_tokens for usage in usages)
    assert totals.drafted == sum(usage.drafted for usage in usages)
    assert totals.verified == sum(usage.verified for usage in usages)
    assert totals.accepted == sum(usage.accepted for usage in usages)


def letters(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


def requests(number: int, max_tokens: int = 40, **options: Any) -> list[Request]:
    return [Request(f"r{index}", letters(f"prompt {index}"), max_tokens, **options) for index in range(number)]


@pytest.mark.parametrize("prefill_chunk", [4, 256])
def test_a_perfect_drafter_is_always_accepted_so_its_context_has_no_hole(prefill_chunk: int) -> None:
    engine = scripted_engine("dflash", accuracy=1.0, max_batch=16, mean_length=1e9, prefill_chunk=prefill_chunk)
    arrivals = {3 * index: [request] for index, request in enumerate(requests(24, 33))}
    streams = run(engine, arrivals, {40: ["r5"], 45: ["r9"]})
    for stream in streams.values():
        if stream.finish is FinishReason.LENGTH:  # one token by the prompt, then four whole blocks of 8
            assert stream.steps == 5
            assert stream.usage is not None
            assert stream.usage.accepted == stream.usage.verified == 28


def test_a_hopeless_drafter_still_advances_every_request() -> None:
    engine = scripted_engine("dflash", accuracy=0.0, mean_length=1e9)
    streams = run_all(engine, *requests(8, 30))
    assert all(stream.steps == 30 for stream in streams.values())
    assert engine.trace.totals.accepted == 0


def test_five_hundred_steps_with_reused_slots_and_cancels_leave_both_caches_right() -> None:
    script = letters_script()
    engine = scripted_engine("ratio:0.5", script=script, max_batch=4, max_len=MAX_LEN, num_blocks=40, block_size=8)
    crowd = {2 * index: [Request(f"r{index}", letters(f"{index} go"), 30)] for index in range(250)}
    cancels = {2 * index + 3: [f"r{index}"] for index in range(0, 250, 3)}
    streams = run(engine, crowd, cancels)
    for arriving in crowd.values():
        check_stream(streams, arriving[0], script)


@pytest.mark.parametrize("policy", [*POLICIES[1:]])
def test_eos_at_every_offset_of_a_block(policy: str) -> None:
    script = Script(258, EOS, 1e9, seed=11)
    for offset in range(1, 18):
        request = Request("r", letters("a"), 30)
        plain, _, _ = expected(script, request)
        ending = Script(258, EOS, 1e9, seed=11)
        state = ending.state([*request.prompt_ids, *plain[:offset]])
        ending.logits[state, EOS] = 99.0
        ending.argmax[state] = EOS
        engine = scripted_engine(policy, script=ending, accuracy=1.0)
        stream = run_all(engine, request)["r"]
        assert stream.tokens == [*plain[:offset], EOS]
        assert stream.finish is FinishReason.STOP


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prefill_chunk", [7, 64])
def test_prompts_up_to_the_context_limit_end_there_and_disturb_nobody(policy: str, prefill_chunk: int) -> None:
    script = letters_script(1e9)
    block = 8
    crowd = [
        Request(f"r{short}", tuple(range(65, 65 + MAX_LEN - short)), 50, ignore_eos=True)
        for short in range(1, block + 2)
    ]
    neighbour = Request("neighbour", letters("hello"), 60)
    engine = scripted_engine(policy, script=script, max_len=MAX_LEN, accuracy=0.9, prefill_chunk=prefill_chunk)
    streams = run_all(engine, neighbour, *crowd)
    for short, request in enumerate(crowd, start=1):
        stream = streams[request.request_id]
        assert stream.outcome == expected(script, request, MAX_LEN)
        assert (len(stream.tokens), stream.finish) == (short, FinishReason.LENGTH)
    assert streams["neighbour"].outcome == expected(script, neighbour, MAX_LEN)


@pytest.mark.parametrize("policy", ["plain", "dflash"])
def test_prompt_chunks_and_decode_steps_take_turns(policy: str) -> None:
    engine = scripted_engine(policy, prefill_chunk=16, mean_length=1e9)
    engine.submit(Request("streaming", letters("hi"), 200))
    checked_step(engine)
    engine.submit(Request("long", (65,) * 100, 5))
    engine.trace.reset()
    while not any(event.request_id == "long" for event in checked_step(engine)):
        assert engine.trace.totals.steps < 50
    kinds = [record.kind for record in engine.trace.records]
    assert kinds.count("prefill") == 7
    assert all("decode" in pair for pair in pairwise(kinds))
    assert max(record.rows for record in engine.trace.records if record.kind == "prefill") == 16


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_at_any_ratio() -> None:
    script = Script(258, EOS, 1e9, seed=2)
    request = Request("r", letters("seeded"), 40, SamplingParams(1.0, seed=123))
    alone = run_alone(request, script)
    for policy in POLICIES:
        crowd = [Request(f"n{index}", letters("other"), 30, SamplingParams(1.0, seed=index)) for index in range(5)]
        streams = run_all(scripted_engine(policy, script=script), *crowd, request)
        assert streams["r"].tokens == alone.tokens


def test_without_a_seed_every_run_differs() -> None:
    unseeded = Request("r", letters("seeded"), 40, SamplingParams(1.0))
    script = Script(258, EOS, 1e9, seed=2)
    first, second = (run_alone(unseeded, script).tokens for _ in range(2))
    assert first != second


def small_script() -> Script:
    """Four tokens and a distribution that differs from state to state."""
    script = Script(258, EOS, 1e9, seed=4)
    script.logits[:, 4:] = -40.0
    script.argmax[:] = script.logits.argmax(axis=1)
    return script


@pytest.mark.parametrize("policy", ["plain", "dflash", "ratio:0.5"])
def test_sampled_tokens_follow_the_model_at_every_position_with_and_without_pruning(policy: str) -> None:
    script = small_script()
    runs = 2000
    engine = scripted_engine(policy, script=script, max_batch=8, max_len=32, draft_length=3, max_queue=runs)
    crowd = [Request(f"r{seed}", (0, 1), 3, SamplingParams(1.0, seed=seed)) for seed in range(runs)]
    streams = run_all(engine, *crowd)

    def share(prefix: list[int], token: int) -> float:
        weights = np.exp(script.logits[script.state(prefix)].astype(np.float64))
        return float(weights[token] / weights.sum())

    wanted = dict.fromkeys(np.ndindex(4, 4, 4), 0.0)
    for path in wanted:
        prefix = [0, 1]
        wanted[path] = float(runs)
        for token in path:
            wanted[path] *= share(prefix, token)
            prefix.append(token)
    seen = dict.fromkeys(wanted, 0)
    for stream in streams.values():
        seen[tuple(stream.tokens)] += 1
    # Rare paths are counted as one, so that every cell expects enough.
    common = [path for path, expectation in wanted.items() if expectation >= 10]
    cells = [(seen[path], wanted[path]) for path in common]
    cells.append((runs - sum(seen for seen, _ in cells), runs - sum(expectation for _, expectation in cells)))
    statistic = sum((found - expectation) ** 2 / expectation for found, expectation in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 3.1 * (2 * freedom) ** 0.5 + 5  # about one run in a thousand exceeds it


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
    for request in crowd:
        engine.submit(request)
    checked_step(engine)
    broken = engine.scheduler.running[1]
    broken._decode = lambda ids: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    events = {event.request_id: event for event in checked_step(engine)}
    error = events["r1"].error
    assert isinstance(error, StepFailed)
    assert "r1" in str(error)
    assert "ZeroDivisionError" in str(error)
    assert engine.running == 2
    tokens = {request.request_id: list(engine.scheduler.running[0].tokens) for request in crowd[:1]}
    while engine.has_work:
        for event in checked_step(engine):
            tokens.setdefault(event.request_id, []).extend(event.tokens)
            assert event.error is None
    assert tokens["r0"][len(crowd[0].prompt_ids) :] == expected(script, crowd[0])[0]


class NanDrafter:
    """Confidence NaN for the first request of every batch."""

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
    now = count(0.0, 0.5)
    engine.clock = lambda: next(now)
    running = Request("running", letters("a"), 200, deadline=5.0)
    queued = Request("queued", letters("bc"), 200, deadline=2.0)
    streams = run_all(engine, running, queued)
    for stream in streams.values():
        assert isinstance(stream.error, DeadlineExceeded)
    assert len(streams["running"].tokens) == 9  # one per reading of the clock, but for the one that ended "queued"
    assert "9 output tokens" in str(streams["running"].error)
    assert not streams["queued"].tokens
    assert engine.trace.totals.prompt_tokens == 1


def test_a_policy_that_drafts_cannot_follow_one_that_does_not_while_requests_run() -> None:
    engine = scripted_engine("plain", mean_length=1e9)
    engine.submit(Request("r", letters("a"), 50))
    checked_step(engine)
    with pytest.raises(UnsupportedOption, match="dflash"):
        engine.policy = make_policy("dflash", None)
    engine.cancel("r")
    checked_step(engine)
    engine.policy = make_policy("dflash", None)


def test_policies_that_draft_may_change_between_any_two_steps() -> None:
    script = letters_script()
    engine = scripted_engine("dflash", script=script)
    crowd = requests(5)
    for request in crowd:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in crowd}
    step = 0
    while engine.has_work:
        engine.policy = make_policy(POLICIES[1 + step % 5], None)
        for event in checked_step(engine):
            tokens[event.request_id].extend(event.tokens)
        step += 1
    for request in crowd:
        assert tokens[request.request_id] == expected(script, request)[0]


def test_an_idle_step_does_nothing() -> None:
    engine = scripted_engine()
    assert engine.step() == []
    assert engine.target.calls == []  # type: ignore[attr-defined]
