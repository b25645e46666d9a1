"""S8, S9: both caches hold exactly what was committed, whatever is rejected, aborted and reused, in any company."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import poison_unowned
from scripted_runs import (
    LETTERS,
    POLICIES,
    Stream,
    Streams,
    expected,
    letters,
    letters_script,
    requests,
    run,
    run_all,
)

from dcut_trt.backends.scripted import Script, scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.policies import make_policy
from dcut_trt.spec.policy import Policy
from dcut_trt.spec.rules import DCut
from dcut_trt.stage_types import Draft, DraftInput
from dcut_trt.types import FinishReason, Request, SamplingParams, StepEvent

MAX_LEN = 96
RATIOS = (0.25, 0.5, 0.75, 1.0)


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
def test_s8_s9_every_request_gives_what_it_gives_alone(
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
    for arriving in arrivals.values():
        for request in arriving:
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


@pytest.mark.parametrize("prefill_chunk", [4, 256])
def test_s8_a_perfect_drafter_is_always_accepted_so_its_context_has_no_hole(prefill_chunk: int) -> None:
    engine = scripted_engine("dflash", accuracy=1.0, max_batch=16, mean_length=1e9, prefill_chunk=prefill_chunk)
    arrivals = {3 * index: [request] for index, request in enumerate(requests(24, 33))}
    streams = run(engine, arrivals, {40: ["r5"], 45: ["r9"]})
    for stream in streams.values():
        if stream.finish is FinishReason.LENGTH:  # one token by the prompt, then four whole blocks of 8
            assert stream.steps == 5
            assert stream.usage is not None
            assert stream.usage.accepted == stream.usage.verified == 28


def test_s8_a_hopeless_drafter_still_advances_every_request() -> None:
    engine = scripted_engine("dflash", accuracy=0.0, mean_length=1e9)
    streams = run_all(engine, *requests(8, 30))
    assert all(stream.steps == 30 for stream in streams.values())
    assert engine.trace.totals.accepted == 0


def test_s8_five_hundred_steps_with_reused_slots_and_cancels_leave_both_caches_right() -> None:
    script = letters_script()
    engine = over_poison(
        scripted_engine("ratio:0.5", script=script, max_batch=4, max_len=MAX_LEN, num_blocks=40, block_size=8)
    )
    crowd = {2 * index: [Request(f"r{index}", letters(f"{index} go"), 30)] for index in range(250)}
    cancels = {2 * index + 3: [f"r{index}"] for index in range(0, 250, 3)}
    streams = run(engine, crowd, cancels)
    for arriving in crowd.values():
        check_stream(streams, arriving[0], script)


def over_poison(engine: Engine) -> Engine:
    """Every step finds garbage in all rows that nobody owns; afterwards both caches' lengths are checked."""
    step = engine.step

    def checked() -> list[StepEvent]:
        poison_unowned(engine)
        events = step()
        for sequence in engine.scheduler.running:
            if sequence.output_length:
                # The newest token is computed in the next step; the drafter's context never runs ahead of the target's.
                assert sequence.kv_len == len(sequence.tokens) - 1
                assert sequence.context_len + sum(map(len, sequence._features)) == sequence.kv_len
        return events

    engine.step = checked  # type: ignore[method-assign]
    return engine


class WrongAt:
    """A drafter whose guesses are right up to one depth, and wrong there."""

    network_ms = 0.0

    def __init__(self, engine: Engine, depth: int) -> None:
        self._inner, self._depth = engine.drafter, depth
        self._cache = self._inner._cache  # type: ignore[attr-defined]

    def propose(self, drafts: DraftInput) -> Draft:
        draft = self._inner.propose(drafts)
        draft.tokens[:, self._depth] = (draft.tokens[:, self._depth] + 1) % 256
        return draft

    def close(self) -> None: ...


@pytest.mark.parametrize("depth", range(7))
def test_s8_a_rejection_at_every_depth_leaves_both_caches_right(depth: int) -> None:
    script = letters_script(1e9)
    engine = over_poison(scripted_engine("dflash", script=script, accuracy=1.0, max_batch=4, block_size=4))
    engine.drafter = WrongAt(engine, depth)
    crowd = requests(9, 33)
    streams = run(engine, {0: crowd[:4], 2: crowd[4:]}, {4: ["r1"], 5: ["r6"]})
    for request in crowd:
        stream = streams[request.request_id]
        if stream.finish is FinishReason.LENGTH:
            assert stream.outcome == expected(script, request)
            assert stream.usage is not None
            assert stream.usage.accepted == 32 - 32 // (depth + 1)  # all but the target's own token of each whole step
            assert stream.usage.verified == 7 * (stream.usage.steps - 1)


def test_s9_sixteen_with_joins_and_leaves_give_what_each_gives_alone_with_the_same_acceptance() -> None:
    script = letters_script(1e9)
    crowd = [Request(f"r{index}", letters(f"{index} go"), 20 + index % 7) for index in range(48)]
    options = {"script": script, "accuracy": 1.0, "prefix_cache": False}
    alone: dict[str, Stream] = {}
    for request in crowd:
        alone |= run_all(steady(scripted_engine("dflash", max_batch=1, **options)), request)
    engine = steady(over_poison(scripted_engine("dflash", max_batch=16, block_size=4, **options)))
    widths: set[int] = set()
    engine.trace.listeners.append(lambda record, commits: widths.add(record.batch))
    arrivals = {index // 3: crowd[index : index + 3] for index in range(0, 48, 3)}
    streams = run(engine, arrivals, {9: ["r10", "r20"], 14: ["r30"]})
    assert max(widths) == 16
    for name, stream in streams.items():
        if stream.finish is FinishReason.LENGTH:
            assert (stream.outcome, stream.usage) == (alone[name].outcome, alone[name].usage)
        else:
            assert stream.tokens == alone[name].tokens[: len(stream.tokens)]


def steady(engine: Engine) -> Engine:
    """Whether a guess is right depends on its request and place alone, not on the order of draws."""
    inner = engine.drafter
    propose = inner.propose

    def propose_steadily(drafts: DraftInput) -> Draft:
        draft = propose(drafts)
        lengths = drafts.context_lens + [sum(map(len, pieces)) for pieces in drafts.features]
        for row, (anchor, length) in enumerate(zip(drafts.anchors.tolist(), lengths.tolist(), strict=True)):
            if (anchor + length) % 3:
                place = (anchor + length) % draft.tokens.shape[1]
                draft.tokens[row, place] = (draft.tokens[row, place] + 1) % 256
        return draft

    inner.propose = propose_steadily  # type: ignore[method-assign]
    return engine
