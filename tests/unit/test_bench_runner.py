"""Closed loops over the scripted model: who is served when, and that nothing is lost or counted twice."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest

from dcut_server.bench.datasets import Prompt
from dcut_server.bench.options import BenchOptions, InvalidBenchOption, check_batch, check_requests
from dcut_server.bench.runner import chat_requests, measure, round_slice, serve, turns
from dcut_server.bench.summary import summarise
from dcut_server.bench.watcher import Watcher
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.policies import make_policy

OPTIONS = BenchOptions(("plain", "dflash", "ratio:0.5", "dcut"), (1, 3), requests=4, rounds=2, max_tokens=12)
PROMPTS = [Prompt(f"p{index}", f"prompt {index}") for index in range(5)]
TABLE = CostTable((1, 8), (0.5, 1.0), np.array([[1.0, 1.5], [2.0, 4.0]]), np.array([0.9, 1.5]), "test", "now")


def test_turns_give_every_policy_every_place():
    policies = "abcdef"
    assert turns(policies, 0, 3) == list("abcdef")
    assert turns(policies, 1, 3) == list("cdefab")
    assert turns(policies, 0, 1) == list("abcdef")
    places = Counter(
        (place, name) for round_number in range(12) for place, name in enumerate(turns(policies, round_number, 12))
    )
    assert set(places.values()) == {2}


def test_turns_never_lose_a_policy():
    for count in range(1, 8):
        for rounds in range(1, 9):
            for round_number in range(rounds):
                assert sorted(turns(range(count), round_number, rounds)) == list(range(count))


def test_rounds_take_the_next_prompts_and_start_again(engine):
    requests = chat_requests(PROMPTS, engine.tokenizer, OPTIONS)
    slices = [round_slice(requests, 4, number) for number in range(3)]
    assert [[request.prompt_ids for request in part] for part in slices] == [
        [requests[index].prompt_ids for index in places] for places in ([0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1])
    ]
    longer = round_slice(requests, 12, 0)
    assert len({request.request_id for request in longer}) == 12


def test_requests_are_chats_with_a_seed_of_their_own(engine):
    requests = chat_requests(PROMPTS, engine.tokenizer, BenchOptions(ignore_eos=True, max_tokens=9))
    assert engine.tokenizer.decode(requests[0].prompt_ids) == "user: prompt 0\nassistant: "
    assert [request.sampling.seed for request in requests] == [0, 1, 2, 3, 4]
    assert all(r.ignore_eos and r.max_tokens == 9 and r.sampling.greedy for r in requests)


def test_limits_are_spread_over_the_range_in_every_part_of_the_dataset():
    options = BenchOptions(max_tokens=64, range_ratio=0.5)
    limits = [options.max_tokens_of(place) for place in range(300)]
    for first in range(0, 300, 30):
        part = limits[first : first + 30]
        assert 32 <= min(part) <= 36
        assert 92 <= max(part) <= 96
        assert mean(part) == pytest.approx(64, rel=0.05)
    assert {BenchOptions(max_tokens=9).max_tokens_of(place) for place in range(30)} == {9}
    assert BenchOptions(max_tokens=1, range_ratio=0.9).max_tokens_of(0) == 1


def test_tokens_count_as_long_as_the_load_is_full(engine):
    options = BenchOptions(max_tokens=20, range_ratio=0.8, ignore_eos=True)
    requests = round_slice(chat_requests(PROMPTS, engine.tokenizer, options), 7, 0)
    served = serve(engine, requests, 3, "plain")
    assert served.loaded is not None
    tokens, seconds = served.loaded
    assert 0 < tokens < served.output_tokens == sum(request.max_tokens for request in requests)
    assert served.tokens_per_s == tokens / seconds
    few = serve(engine, requests, 4, "plain")  # less than two loads of requests: the tail counts too
    assert few.tokens_per_s == few.output_tokens / few.wall_s
    alone = serve(engine, requests, 1, "plain")
    assert alone.loaded == (alone.output_tokens, pytest.approx(alone.wall_s, rel=0.01))


@pytest.mark.parametrize("concurrency", [1, 3, 4, 9])
def test_a_closed_loop_serves_everyone_and_holds_its_concurrency(engine, concurrency):
    requests = round_slice(chat_requests(PROMPTS, engine.tokenizer, OPTIONS), 7, 0)
    live: list[int] = []
    step = engine.step
    engine.step = lambda: (live.append(len(engine.scheduler.live_ids())), step())[1]
    served = serve(engine, requests, concurrency, "dflash")
    assert max(live) == min(concurrency, 7)
    assert len(served.streams) == 7
    assert all(len(stream.tokens) == sum(count for _, count in stream.arrivals) for stream in served.streams)
    assert served.output_tokens == sum(record.emitted for record in served.records)
    assert all(stream.arrivals[0][0] >= stream.submitted for stream in served.streams)
    assert not engine.has_work


def test_every_step_is_recorded_though_the_trace_forgets(engine):
    engine.trace.records = deque(maxlen=1)
    served = serve(engine, chat_requests(PROMPTS, engine.tokenizer, OPTIONS), 2, "dflash")
    assert len(served.records) == engine.trace.totals.steps > 5


def test_policies_take_turns_within_each_round(engine):
    passes = measure(engine, chat_requests(PROMPTS, engine.tokenizer, OPTIONS), OPTIONS)
    first, second = ["plain", "dflash", "ratio:0.5", "dcut"], ["ratio:0.5", "dcut", "plain", "dflash"]
    expected = [
        (concurrency, number, name)
        for concurrency in (1, 3)
        for number, names in enumerate((first, second))
        for name in names
    ]
    assert [(served.concurrency, served.round, served.policy) for served in passes] == expected
    assert all(len(served.streams) == 4 for served in passes)


def test_progress_counts_every_pass_with_its_warm_up(engine):
    seen: list[tuple[int, int, str]] = []
    measure(engine, chat_requests(PROMPTS, engine.tokenizer, OPTIONS), OPTIONS, lambda *what: seen.append(what))
    assert [done for done, _, _ in seen] == list(range(OPTIONS.passes + 1))
    assert seen[0] == (0, 24, "concurrency 1, plain")
    assert {total for _, total, _ in seen} == {2 * 4 * (2 + 1)}


def test_temperatures_run_after_one_another_and_keep_their_seeds(engine):
    options = replace(OPTIONS, temperatures=(0.0, 0.8), policies=("plain", "dflash"), rounds=1)
    submit, submitted = engine.submit, []
    engine.submit = lambda request: (submitted.append(request), submit(request))[1]
    passes = measure(engine, chat_requests(PROMPTS, engine.tokenizer, options), options)
    assert [served.temperature for served in passes] == [0.0] * 4 + [0.8] * 4
    assert len({(request.request_id, request.sampling.seed) for request in submitted}) == 4
    half = len(submitted) // 2
    assert {request.sampling.temperature for request in submitted[:half]} == {0.0}
    assert {request.sampling.temperature for request in submitted[half:]} == {0.8}
    cells = summarise(passes)
    assert [cell.temperature for cell in cells] == [0.0] * 4 + [0.8] * 4
    assert [cell.difference is None for cell in cells] == [False] * 4 + [True] * 4
    assert all(cell.speedup == 1.0 for cell in cells if cell.policy == "plain")


def test_a_policy_lives_for_the_whole_run_and_is_watched_in_what_counts(engine, monkeypatch):
    made: list[tuple[str, object]] = []

    def make(name, table, traits):
        made.append((name, traits))
        return make_policy(name, table, traits)

    monkeypatch.setattr("dcut_server.bench.runner.make_policy", make)
    passes = measure(engine, chat_requests(PROMPTS, engine.tokenizer, OPTIONS), OPTIONS)
    assert made == [(name, engine.limits.traits) for name in OPTIONS.policies]
    for served in passes:
        drafting = [record for record in served.records if record.kind == "decode" and served.policy != "plain"]
        assert [len(watched.keep) for watched in served.watched] == [record.batch for record in drafting]
        assert [int(watched.keep.sum()) for watched in served.watched] == [record.kept for record in drafting]
        assert [int(watched.accepted.sum()) for watched in served.watched] == [record.accepted for record in drafting]


def test_watching_changes_nothing_that_a_policy_does():
    decided = []
    for watched in (False, True):
        engine = scripted_engine()
        requests = round_slice(chat_requests(PROMPTS, engine.tokenizer, OPTIONS), 4, 0)
        policy = make_policy("dcut", TABLE, engine.limits.traits)
        engine.policy = Watcher(policy, engine.limits.draft_length) if watched else policy
        records = serve(engine, requests, 3, "dcut").records
        decided.append([(record.kind, record.batch, record.rows, record.ratio, record.emitted) for record in records])
    assert decided[0] == decided[1]


def test_the_engine_gets_its_policy_back(engine):
    served = engine.policy
    measure(engine, chat_requests(PROMPTS, engine.tokenizer, OPTIONS), OPTIONS)
    assert engine.policy is served


def test_a_request_that_fails_ends_the_measurement(engine):
    engine.target.forward = broken(engine)
    with pytest.raises(RuntimeError, match="the device is gone"):
        measure(engine, chat_requests(PROMPTS, engine.tokenizer, OPTIONS), OPTIONS)


def test_all_policies_give_the_tokens_of_plain_decoding(engine):
    cells = summarise(measure(engine, chat_requests(PROMPTS, engine.tokenizer, OPTIONS), OPTIONS))
    assert [(cell.concurrency, cell.policy) for cell in cells] == [(c, p) for c in (1, 3) for p in OPTIONS.policies]
    for cell in cells:
        assert cell.difference is not None
        assert cell.difference.tokens == 0
        assert cell.difference.compared == cell.output_tokens > 0
    taus = {cell.policy: cell.tau for cell in cells if cell.concurrency == 3}
    assert taus["plain"] == 1.0 < min(taus["ratio:0.5"], taus["dflash"], taus["dcut"])


def test_a_lossy_policy_is_caught(engine):
    engine.target.forward = lossy(engine)
    passes = measure(engine, chat_requests(PROMPTS, engine.tokenizer, OPTIONS), OPTIONS)
    plain, dflash = summarise(passes)[:2]
    assert plain.difference is not None
    assert dflash.difference is not None
    assert plain.difference.tokens == 0
    assert dflash.difference.tokens > dflash.difference.requests > 0
    sampled = [replace(served, temperature=0.7) for served in passes]
    assert all(cell.difference is None for cell in summarise(sampled))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"policies": ()}, r"--policies \(none\): at least one"),
        ({"policies": ("plain", "fast")}, "--policies fast: .*must be one of plain, dflash"),
        ({"policies": ("plain", "plain")}, "--policies plain,plain: a value is there twice"),
        ({"policies": ("ratio:1.5",)}, "--policies ratio:1.5: "),
        ({"concurrency": (4, 0)}, "--concurrency 0: must be at least 1"),
        ({"concurrency": (4, 4)}, "--concurrency 4,4: a value is there twice"),
        ({"requests": 0}, "--requests 0: must be at least 1"),
        ({"rounds": 0}, "--rounds 0: must be at least 1"),
        ({"max_tokens": -1}, "--max-tokens -1: must be at least 1"),
        ({"range_ratio": 1.0}, "--range-ratio 1.0: must be at least 0 and below 1"),
        ({"range_ratio": float("nan")}, "--range-ratio nan: must be at least 0 and below 1"),
        ({"temperatures": (0.0, float("nan"))}, "--temperature nan: must be finite and at least 0"),
        ({"temperatures": (1.0, 1.0)}, "--temperature 1.0,1.0: a value is there twice"),
    ],
)
def test_options_out_of_range_are_refused_by_name_value_and_limit(values, said):
    with pytest.raises(InvalidBenchOption, match=said):
        BenchOptions(**values)


def test_what_does_not_fit_the_bundle_is_refused(engine):
    with pytest.raises(InvalidBenchOption, match="--concurrency 32: the bundle's max_batch is 8"):
        check_batch(BenchOptions(), 8)
    options = BenchOptions(concurrency=(8,), max_tokens=200)
    requests = chat_requests(PROMPTS, engine.tokenizer, options)
    check_requests(options, requests, engine.limits)
    small = scripted_engine(num_blocks=17)
    with pytest.raises(InvalidBenchOption, match=r"--concurrency 8: .*KV blocks, there are 17; raise --kv-memory-mib"):
        check_requests(options, requests, small.limits)
    with pytest.raises(InvalidBenchOption, match=r"--dataset long: prompt='.* tokens': must be at most 255 tokens"):
        check_requests(options, chat_requests([Prompt("long", "x" * 300)], engine.tokenizer, options), engine.limits)


def test_requests_grow_with_the_concurrency_unless_given():
    assert [BenchOptions().requests_at(live) for live in (1, 4, 32)] == [8, 12, 96]
    assert BenchOptions(requests=5).requests_at(32) == 5


@pytest.fixture
def engine() -> Engine:
    made = scripted_engine()
    made.cost_table = TABLE
    return made


def broken(engine: Engine):
    def forward(*_):
        raise RuntimeError("the device is gone")

    return forward


def lossy(engine: Engine):
    """A target whose answers depend on how many rows a request has."""
    exact = engine.target.forward

    def forward(rows, head_rows, logit_rows):
        verified = exact(rows, head_rows, logit_rows)
        if len(rows.token_ids) > len(rows.past_lens) and int(rows.past_lens.min()) > 0:
            verified.argmax[:] = (verified.argmax + 1) % 256
        return verified

    return forward
