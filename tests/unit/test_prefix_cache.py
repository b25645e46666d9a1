"""Requests begin with blocks that others have computed, and nobody can tell from the output."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import poison_unowned
from scripted_runs import POLICIES, Stream, checked_step, expected, letters, letters_script, run, run_all

from dcut_trt.backends.base import Limits
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.kv.prefix import ROOT, PrefixIndex
from dcut_trt.scheduler import Scheduler
from dcut_trt.spec.policies import make_policy
from dcut_trt.spec.policy import Policy
from dcut_trt.spec.profiler import profile
from dcut_trt.spec.rules import FixedDepth
from dcut_trt.stage_types import BatchView, Intent
from dcut_trt.types import Request, SamplingParams, StepEvent

BLOCK = 4
MAX_LEN = 96


def small_engine(policy: str | Policy = "ratio:0.5", **options: object) -> Engine:
    """Blocks are so short that everything shares something."""
    defaults = {"script": letters_script(), "max_len": MAX_LEN, "block_size": BLOCK, "max_batch": 4}
    return poisoned(scripted_engine(policy, **(defaults | options)))  # type: ignore[arg-type]


def poisoned(engine: Engine) -> Engine:
    step = engine.step

    def step_over_poison() -> list[StepEvent]:
        poison_unowned(engine)
        return step()

    engine.step = step_over_poison  # type: ignore[method-assign]
    return engine


def cached_tokens(stream: Stream) -> int:
    assert stream.usage is not None
    return stream.usage.cached_tokens


def solo(engine: Engine, request: Request) -> Stream:
    return run_all(engine, request)[request.request_id]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_prompt_again_is_not_computed_but_for_its_last_block(policy: str) -> None:
    script = letters_script(1e9)
    engine = small_engine(policy, script=script)
    request = Request("r", letters("x" * 10 + "yz"), 20)
    assert cached_tokens(solo(engine, request)) == 0
    engine.trace.reset()
    again = solo(engine, request)
    assert again.outcome == expected(script, request)
    assert cached_tokens(again) == 8  # 12 tokens: the last one has to be computed, and with it its block
    assert engine.trace.totals.prompt_tokens == 4


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_at_least_one_prompt_token_is_computed(length: int, cached: int) -> None:
    engine = small_engine()
    request = Request("r", letters("abcdefghi"[:length]), 20, ignore_eos=True)
    solo(engine, request)
    assert cached_tokens(solo(engine, request)) == cached


def test_a_chat_goes_on_from_its_own_answer() -> None:
    script = letters_script(1e9)
    engine = small_engine("dflash", script=script)
    first = Request("r", letters("question"), 30)
    answer = solo(engine, first).tokens
    second = replace(first, prompt_ids=(*first.prompt_ids, *answer, *letters("and then?")))
    stream = solo(engine, second)
    assert stream.outcome == expected(script, second, MAX_LEN)
    assert cached_tokens(stream) >= len(first.prompt_ids) + 16


def test_a_prefix_is_shared_while_its_first_owner_still_runs() -> None:
    script = letters_script(1e9)
    engine = small_engine("dflash", script=script, max_batch=8, num_blocks=100)
    prompt = letters("the system prompt that all of them have. ")
    crowd = [Request(f"r{index}", (*prompt, 65 + index), 12) for index in range(6)]
    arrivals = {0: crowd[:1], 4: crowd[1:3], 8: crowd[3:]}
    engine.submit(Request("longest", (*prompt, 90), 50))
    streams = {"longest": Stream()}
    step = 0
    while engine.has_work:
        for request in arrivals.get(step, ()):
            engine.submit(request)
            streams[request.request_id] = Stream()
        for event in checked_step(engine):
            streams[event.request_id].add(event)
        if step == 9:
            table = engine.scheduler.running[0].block_table
            assert engine.scheduler.pool.owners(int(table[0])) >= 4
        step += 1
    for request in crowd:
        assert streams[request.request_id].outcome == expected(script, request, MAX_LEN)
    assert [cached_tokens(streams[request.request_id]) for request in crowd[1:]] == [40] * 5


def test_a_request_that_waits_for_memory_needs_less_of_it_where_it_shares() -> None:
    engine = small_engine("plain", script=letters_script(1e9), num_blocks=12, max_batch=2)
    prompt = letters("0123456789abcdef")
    for name in ("a", "b"):
        engine.submit(Request(name, prompt, 4))  # 7 blocks each, of which 3 can be shared
        checked_step(engine)
    checked_step(engine)
    assert engine.running == 2


def test_eviction_takes_the_oldest_and_leaves_output_right() -> None:
    script = letters_script(1e9)
    engine = small_engine("dflash", script=script, num_blocks=16, max_batch=2)
    crowd = [Request(f"r{index}", letters(f"{index} is a number"), 10) for index in range(8)]
    for request in [*crowd, *reversed(crowd)]:
        assert solo(engine, request).outcome == expected(script, request)
    assert cached_tokens(solo(engine, replace(crowd[0], request_id="again"))) > 0
    assert cached_tokens(solo(engine, replace(crowd[7], request_id="evicted"))) == 0
    assert engine.scheduler.pool.cached <= 16


@pytest.mark.parametrize("leaver", ["first", "second"])
def test_an_abort_while_sharing_leaves_the_other_unharmed(leaver: str) -> None:
    script = letters_script(1e9)
    prompt = letters("a prompt of some length")
    for step in range(3, 14):
        engine = small_engine("dflash", script=script)
        crowd = [Request(name, (*prompt, 65 + index), 20) for index, name in enumerate(("first", "second", "third"))]
        arrivals = {0: crowd[:1], 3: crowd[1:2], step + 1: crowd[2:]}
        streams = run(engine, arrivals, {step: [leaver]})
        for request in crowd:
            stream = streams[request.request_id]
            tokens, _, _ = expected(script, request)
            assert stream.tokens == (tokens[: len(stream.tokens)] if request.request_id == leaver else tokens)


@settings(max_examples=80)
@given(
    policy=st.sampled_from(POLICIES),
    prompts=st.lists(st.text("ab", min_size=1, max_size=30), min_size=2, max_size=12),
    arrivals=st.lists(st.integers(0, 30), min_size=12, max_size=12),
    cancels=st.dictionaries(st.integers(1, 40), st.integers(0, 11), max_size=4),
    num_blocks=st.integers(26, 60),
    chunk=st.integers(1, 20),
    sampled=st.booleans(),
)
def test_output_does_not_depend_on_what_is_shared(
    policy: str,
    prompts: list[str],
    arrivals: list[int],
    cancels: dict[int, int],
    num_blocks: int,
    chunk: int,
    sampled: bool,
) -> None:
    script = letters_script()
    sampling = SamplingParams(1.0, seed=5) if sampled else SamplingParams()
    crowd = [Request(f"r{index}", letters(text), 24, sampling) for index, text in enumerate(prompts)]
    engine = small_engine(policy, script=script, num_blocks=num_blocks, prefill_chunk=chunk)
    by_step: dict[int, list[Request]] = {}
    for request, step in zip(crowd, arrivals, strict=False):
        by_step.setdefault(step, []).append(request)
    streams = run(engine, by_step, {step: [f"r{index}"] for step, index in cancels.items()})
    for request in crowd:
        stream = streams[request.request_id]
        tokens, text, finish = expected(script, request, MAX_LEN)
        if stream.finish is finish:
            assert stream.outcome == (tokens, text, finish)
        else:
            assert stream.tokens == tokens[: len(stream.tokens)]


def test_turned_off_nothing_is_kept() -> None:
    engine = small_engine(prefix_cache=False)
    request = Request("r", letters("again and again"), 10)
    assert [cached_tokens(solo(engine, request)) for _ in range(2)] == [0, 0]
    assert engine.scheduler.pool.cached == 0


def test_where_a_block_is_a_whole_cache_nothing_is_shared() -> None:
    limits = Limits(
        max_batch=2, max_len=64, draft_length=7, vocab_size=258, block_size=80, num_blocks=2, feature_size=2
    )
    assert not limits.shares_blocks
    assert not Scheduler(limits, 4, 8).sharing.enabled


def test_rows_that_a_drafter_has_not_seen_are_forgotten_before_it_drafts() -> None:
    script = letters_script(1e9)
    engine = small_engine("plain", script=script)
    request = Request("r", letters("plain, then drafted"), 20)
    solo(engine, request)
    assert cached_tokens(solo(engine, request)) == 16
    engine.policy = make_policy("dflash", None)
    stream = solo(engine, request)
    assert (cached_tokens(stream), stream.outcome) == (0, expected(script, request))
    engine.policy = make_policy("ratio:0.5", None)
    assert cached_tokens(solo(engine, request)) == 16


class Bypassing(FixedDepth):
    """Drafts nothing until it is told to; the drafter is to be kept ready."""

    def __init__(self) -> None:
        self.drafting = False

    def intend(self, view: BatchView) -> Intent:
        return Intent() if self.drafting else Intent(depth=0)


def test_prompts_that_begin_alike_are_shared_though_nobody_drafts() -> None:
    script = letters_script(1e9)
    policy = Bypassing()
    engine = small_engine(policy, script=script)
    start = letters("the same 16 letters begin every prompt ")
    requests = [Request(f"r{index}", (*start, *letters(end)), 12) for index, end in enumerate(("a", "bc", "d", "e"))]
    streams = [solo(engine, request) for request in requests[:3]]
    # The second one shows that the beginning is worth sharing, and the third one has it.
    assert [cached_tokens(stream) for stream in streams] == [0, 0, len(start) // BLOCK * BLOCK]
    policy.drafting = True
    streams.append(solo(engine, requests[3]))
    assert cached_tokens(streams[3]) == len(start) // BLOCK * BLOCK
    assert engine.trace.totals.accepted > 0
    assert [stream.outcome for stream in streams] == [expected(script, request) for request in requests]


def test_prompts_that_begin_apart_cost_the_drafter_nothing() -> None:
    engine = small_engine(Bypassing(), script=letters_script(1e9))
    for index in range(4):
        solo(engine, Request(f"r{index}", letters(f"{index} and the rest of a prompt of its own"), 12))
    assert engine.drafter.network_ms == sum(record.draft_ms for record in engine.trace.records) == 0


def test_a_request_that_fails_offers_nothing_more() -> None:
    engine = small_engine("plain", script=letters_script(1e9))
    engine.tokenizer.decode = lambda ids: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    stream = solo(engine, Request("r", letters("a prompt that breaks"), 10))
    assert stream.error is not None
    assert engine.scheduler.pool.cached == 0


def test_profiling_computes_every_prompt_and_leaves_nothing_behind() -> None:
    engine = small_engine("dflash", max_len=512, max_batch=2)
    prompts: list[int] = []
    forward = engine.target.forward

    def count_prompt_rows(rows: object, *others: object) -> object:
        if rows.prompt:  # type: ignore[attr-defined]
            prompts.extend(rows.past_lens[rows.past_lens == 0].tolist())  # type: ignore[attr-defined]
        return forward(rows, *others)  # type: ignore[arg-type]

    submitted: list[Request] = []
    submit = engine.submit
    engine.submit = lambda request: (submitted.append(request), submit(request))[1]  # type: ignore[method-assign]
    engine.target.forward = count_prompt_rows  # type: ignore[method-assign,assignment]
    profile(engine, (0.5, 1.0), "here")
    assert len(prompts) == len(submitted) > 2
    assert engine.scheduler.pool.cached == 0
    assert engine.scheduler.sharing.enabled


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=9), max_size=30), st.integers(0, 9))
def test_an_index_finds_exactly_the_prefixes_that_were_put_in(texts: list[list[int]], forgotten: int) -> None:
    index, kept = PrefixIndex(3), {}
    block = 0
    for text in texts:
        node = ROOT
        for start in range(0, len(text) - 2, 3):
            before = len(index)
            node = index.insert(node, text[start : start + 3], block)
            if len(index) > before:
                kept[tuple(text[: start + 3])] = block
                block += 1
    gone = {prefix for prefix, held in kept.items() if held == forgotten}
    if gone:
        index.forget(forgotten)
    for text in texts:
        found = [cached.block for cached in index.find(text)]
        prefixes = [tuple(text[:end]) for end in range(3, len(text) + 1, 3)]
        reachable = next((n for n, prefix in enumerate(prefixes) if prefix in gone), len(prefixes))
        assert found == [kept[prefix] for prefix in prefixes[:reachable]]


def test_a_full_cache_admits_as_much_as_an_empty_one() -> None:
    engine = small_engine("dflash", num_blocks=26, max_batch=4)
    for index in range(6):
        solo(engine, Request("r", letters(f"{index} fills the cache"), 20))
    assert engine.scheduler.pool.cached > 0
    assert engine.free_blocks == 26
    largest = Request("r", letters("z" * 60), 35)
    assert np.array_equal(solo(engine, largest).tokens, expected(letters_script(), largest, MAX_LEN)[0])


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_a_drafter_has_seen_every_row_that_a_request_begins_with(steps: int) -> None:
    """One that knew less of the prefix than the target would guess wrong; the first request leaves at any moment."""
    script = letters_script(1e9)
    engine = small_engine("dflash", script=script, accuracy=1.0, prefill_chunk=16)
    prompt = letters("a prompt of five or more blocks")
    engine.submit(Request("first", prompt, 30))
    for _ in range(steps):
        checked_step(engine)
    engine.cancel("first")
    checked_step(engine)
    stream = solo(engine, Request("second", prompt, 33))
    assert stream.usage is not None
    assert stream.usage.accepted == stream.usage.verified == 28
    assert (cached_tokens(stream) > 0) == (steps > 0)
