"""What a request asks for holds inside a speculative block (S1-S4, S7, S10-S13): all equals plain decoding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from naive_semantics import Answer, answer
from real_runs import chat_prompts
from scripted_runs import EOS, TOKENIZER, Stream, letters, letters_script, run_all

from dcut_trt.backends.scripted import Script, scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.errors import StepFailed
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.policies import make_policy
from dcut_trt.stage_types import DraftTraits
from dcut_trt.types import FinishReason, Request, SamplingParams

POLICIES = ("plain", "dflash", "ratio:0.5", "dcut", "auto")
# Not measured: costs so close together that the choice changes from step to step.
TRAITS = DraftTraits(7, any_budget=True, short_blocks=True)  # of the scripted drafter
TABLE = CostTable(
    (1,), (0.25, 0.5, 0.75, 1.0), np.array([[10.0, 10.9, 11.0, 11.04]]), np.array([9.0]), "fixed", "never"
)
MAX_LEN, BLOCK = 64, 8
PROMPT = letters("abc ")
PENALISED = SamplingParams(
    repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.15, logit_bias=((letters("b")[0], 0.5),)
)


def serve(script: Script, policy: str, *requests: Request, accuracy: float = 1.0) -> dict[str, Stream]:
    """Requests together, all drafts right unless told otherwise, so that ends lie inside a block."""
    engine = scripted_engine(make_policy(policy, TABLE, TRAITS), script=script, max_len=MAX_LEN, accuracy=accuracy)
    return run_all(engine, *requests)


def seen(stream: Stream) -> Answer:
    assert stream.error is None
    return Answer(stream.tokens, stream.text, stream.finish, stream.matched, stream.logprobs)


def speaking(output: list[int], prompt: tuple[int, ...] = PROMPT) -> Script:
    """A script whose greedy output after the prompt is given."""
    script = Script(258, EOS, 1e9, seed=11)
    states = [script.state([*prompt, *output[:length]]) for length in range(len(output))]
    assert len(set(states)) == len(states), "two prefixes share a row of the script"
    script.logits[states, output] = 20.0
    script.argmax[:] = script.logits.argmax(axis=1)
    return script


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("offset", range(BLOCK + 1))
def test_s1_eos_at_every_offset_of_a_block_ends_the_output_there(policy: str, offset: int) -> None:
    script = speaking([*letters("abcabcabca"[:offset]), EOS])
    request = Request("r", PROMPT, 30, logprobs=1)
    stream = serve(script, policy, request)["r"]
    assert seen(stream) == answer(script, TOKENIZER, request, MAX_LEN)
    assert stream.tokens[-1] == stream.matched == EOS
    assert len(stream.tokens) == len(stream.logprobs) == offset + 1
    shown = serve(script, policy, replace(request, skip_special_tokens=False))["r"]
    assert shown.text == stream.text, "the token that ends a request is no part of its text"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lead", range(BLOCK + 2))
def test_s2_a_stop_string_over_three_tokens_cuts_everything_at_one_boundary(policy: str, lead: int) -> None:
    text = "x" * lead + "END not"
    script = speaking(list(letters(text)))
    request = Request("r", PROMPT, 40, stop=("END",), logprobs=2)
    stream = serve(script, policy, request)["r"]
    assert stream.text == "x" * lead
    assert stream.matched == "END"
    assert stream.usage is not None
    assert len(stream.tokens) == len(stream.logprobs) == stream.usage.output_tokens == lead + 3
    assert seen(stream) == answer(script, TOKENIZER, request, MAX_LEN)


@pytest.mark.parametrize("policy", POLICIES)
def test_s3_the_earliest_stop_string_in_the_text_wins(policy: str) -> None:
    script = speaking(list(letters(" The user is a, b")))
    stream = serve(script, policy, Request("r", PROMPT, 40, stop=("a", "is", ",")))["r"]
    assert (stream.text, stream.matched, stream.finish) == (" The user ", "is", FinishReason.STOP)
    both = serve(script, policy, Request("r", PROMPT, 40, stop=("s", "is", "user is")))["r"]
    assert (both.text, both.matched) == (" The u", "s"), "a shorter one may be complete before a longer one"
    together = serve(script, policy, Request("r", PROMPT, 40, stop=("is", "user is")))["r"]
    assert (together.text, together.matched) == (" The ", "user is")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("left", range(1, BLOCK + 2))
def test_s4_drafts_past_the_context_limit_end_with_length_and_harm_nobody(policy: str, left: int) -> None:
    script = letters_script(1e9)
    prompts = {"near": letters("a" * (MAX_LEN - left)), "far": PROMPT}
    crowd = [Request(name, prompt, 40, ignore_eos=True, logprobs=1) for name, prompt in prompts.items()]
    streams = serve(script, policy, *crowd)
    for request in crowd:
        assert seen(streams[request.request_id]) == answer(script, TOKENIZER, request, MAX_LEN)
    assert streams["near"].finish is FinishReason.LENGTH
    assert len(streams["near"].tokens) == left


FAULTS = {"nan": np.nan, "inf": np.inf, "all minus inf": -np.inf, "all masked": 0.0}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("options", [{"sampling": SamplingParams(1.0, seed=3)}, {"logprobs": 1}, {"min_tokens": 30}])
def test_s7_a_row_that_is_no_distribution_fails_its_request_alone(fault: str, options: dict[str, object]) -> None:
    if fault == "all masked" and "min_tokens" not in options:
        options = {**options, "min_tokens": 30}
    script = Script(258, EOS, 1e9, seed=11)
    victim = Request("victim", PROMPT, 30, **options)  # type: ignore[arg-type]
    neighbours = [
        Request("greedy", letters("one"), 30),
        Request("sampled", letters("two"), 30, SamplingParams(0.8, seed=1, repetition_penalty=1.2), logprobs=3),
    ]
    wanted = [answer(script, TOKENIZER, request, MAX_LEN) for request in neighbours]
    before = answer(script, TOKENIZER, victim, MAX_LEN).tokens[:10]
    row = script.logits[script.state([*PROMPT, *before])]
    if fault == "nan":
        row[5] = np.nan
    elif fault == "inf":
        row[5] = np.inf
    else:
        row[:] = -np.inf
        row[EOS] = FAULTS[fault]
    for policy in POLICIES:
        streams = serve(script, policy, victim, *neighbours)
        error = streams["victim"].error
        assert isinstance(error, StepFailed)
        assert f"position {len(PROMPT) + 10}" in str(error)
        assert streams["victim"].tokens == before[: len(streams["victim"].tokens)]
        assert streams["victim"].times is not None
        assert [seen(streams[request.request_id]) for request in neighbours] == wanted


@pytest.mark.parametrize("policy", POLICIES)
def test_s10_a_seed_decides_alone_in_a_crowd_and_at_any_ratio(policy: str) -> None:
    script = letters_script(1e9)
    request = Request("r", PROMPT, 40, replace(PENALISED, temperature=1.2, seed=7, min_p=0.02), logprobs=2)
    wanted = answer(script, TOKENIZER, request, MAX_LEN)
    crowd = [Request(f"n{index}", letters("other"), 30, SamplingParams(1.0, seed=index)) for index in range(5)]
    assert seen(serve(script, policy, request)["r"]) == wanted
    assert seen(serve(script, policy, *crowd, request, accuracy=0.5)["r"]) == wanted


def test_s10_without_a_seed_every_run_differs() -> None:
    request = Request("r", PROMPT, 40, SamplingParams(1.0))
    assert len({tuple(serve(letters_script(1e9), "dflash", request)["r"].tokens) for _ in range(3)}) == 3


OPTIONS: dict[str, dict[str, object]] = {
    "repetition": {"sampling": SamplingParams(repetition_penalty=1.3)},
    "presence": {"sampling": SamplingParams(presence_penalty=1.0)},
    "frequency": {"sampling": SamplingParams(frequency_penalty=0.3)},
    "bias": {"sampling": SamplingParams(logit_bias=((letters("b")[0], 2.0),))},
    "min_tokens": {"min_tokens": 25},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("option", OPTIONS)
def test_s11_penalties_bias_and_min_tokens_count_inside_a_block(policy: str, option: str) -> None:
    script = letters_script(12.0 if option == "min_tokens" else 1e9)
    crowd = [Request(f"r{index}", letters(f"prompt {index}"), 40) for index in range(4)]
    options = [replace(request, **OPTIONS[option]) for request in crowd]  # type: ignore[arg-type]
    streams = serve(script, policy, *options)
    for request in options:
        assert seen(streams[request.request_id]) == answer(script, TOKENIZER, request, MAX_LEN)
    without = serve(script, policy, *crowd)
    assert [stream.tokens for stream in streams.values()] != [stream.tokens for stream in without.values()]


@pytest.mark.parametrize("policy", POLICIES)
def test_s12_greedy_tokens_are_the_same_with_logprobs_and_each_has_one(policy: str) -> None:
    script = letters_script()
    plain = [Request(f"r{index}", letters(f"prompt {index}"), 30) for index in range(4)]
    without = serve(script, policy, *plain)
    streams = serve(script, policy, *(replace(request, logprobs=20) for request in plain))
    for request in plain:
        stream = streams[request.request_id]
        assert stream.tokens == without[request.request_id].tokens
        assert [entry.token_id for entry in stream.logprobs] == stream.tokens
        for place, entry in enumerate(stream.logprobs):
            row = script.logits[script.state([*request.prompt_ids, *stream.tokens[:place]])].astype(np.float64)
            assert entry.logprob == pytest.approx(row[entry.token_id] - np.log(np.exp(row).sum()))
            assert entry.top[0] == (entry.token_id, entry.logprob)
            assert len(entry.top) == 20


@pytest.mark.parametrize("policy", POLICIES)
def test_s12_logits_are_asked_for_where_a_request_needs_them_and_nowhere_else(policy: str) -> None:
    engine = scripted_engine(make_policy(policy, TABLE, TRAITS), script=letters_script(1e9), max_len=MAX_LEN)
    forward, asked = engine.target.forward, []

    def counting(rows, head_rows, logit_rows):  # type: ignore[no-untyped-def]
        asked.append(len(logit_rows))
        return forward(rows, head_rows, logit_rows)

    engine.target.forward = counting  # type: ignore[method-assign]
    run_all(engine, Request("r", PROMPT, 20, SamplingParams(top_k=5, top_p=0.5, min_p=0.1)))
    assert not any(asked), "greedy without anything else needs the argmax only"
    run_all(engine, Request("r", PROMPT, 20, logprobs=0))
    assert sum(asked) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_s13_metrics_are_the_sum_of_usage_and_count_nothing_past_an_end(policy: str) -> None:
    engine = scripted_engine(make_policy(policy, TABLE, TRAITS), script=letters_script(12.0), max_len=MAX_LEN)
    crowd = [
        Request(f"r{index}", letters(f"prompt {index}"), 25, stop=("ab",), min_tokens=index % 9, logprobs=0)
        for index in range(16)
    ]
    streams = run_all(engine, *crowd).values()
    usages = [stream.usage for stream in streams if stream.usage is not None]
    totals = engine.trace.totals
    assert sum(usage.output_tokens for usage in usages) == sum(len(stream.tokens) for stream in streams)
    assert (totals.output_tokens, totals.drafted, totals.verified, totals.accepted) == (
        sum(usage.output_tokens for usage in usages),
        sum(usage.drafted for usage in usages),
        sum(usage.verified for usage in usages),
        sum(usage.accepted for usage in usages),
    )
    assert all(usage.accepted <= usage.verified <= usage.drafted for usage in usages)


def real_requests(engine: Engine) -> list[Request]:
    """Sampled and greedy ones, with everything at once."""
    period = engine.tokenizer.encode(".", add_special_tokens=False)[0]
    every = replace(PENALISED, logit_bias=((period, -3.0),))
    sampling = [
        replace(every, temperature=0.8, top_p=0.95, min_p=0.02, seed=1),
        replace(every, temperature=1.0, top_k=50, seed=2),
        every,
        SamplingParams(),
    ]
    return [
        Request(f"r{index}", prompt, 32, sampling[index], stop=("\n\n",), min_tokens=16, logprobs=5)
        for index, prompt in enumerate(chat_prompts(engine, 4))
    ]


def test_s11_s12_real_model_plain_equals_dcut_token_for_token(smollm2_engine: Engine) -> None:
    engine = smollm2_engine
    streams: dict[str, dict[str, Stream]] = {}
    for policy in ("plain", "dcut"):
        engine.policy = make_policy(policy, TABLE, TRAITS)
        engine.trace.reset()
        streams[policy] = {}
        for request in real_requests(engine):
            engine.submit(request)
            streams[policy][request.request_id] = Stream()
        while engine.has_work:
            for event in engine.step():
                streams[policy][event.request_id].add(event)
    assert engine.trace.totals.accepted > 0
    for name, plain in streams["plain"].items():
        dcut = streams["dcut"][name]
        assert plain.error is dcut.error is None
        assert (dcut.outcome, dcut.matched) == (plain.outcome, plain.matched)
        assert len(dcut.tokens) >= 16
        assert [entry.token_id for entry in dcut.logprobs] == dcut.tokens
        for ours, theirs in zip(dcut.logprobs, plain.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert [token for token, _ in ours.top][:1] == [token for token, _ in theirs.top][:1]
