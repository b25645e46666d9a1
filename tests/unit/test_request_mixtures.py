"""Every field of a request, in any mixture, batch and policy, gives what plain decoding by definition gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_semantics import Answer, answer
from scripted_runs import EOS, LETTERS, TOKENIZER, Stream, letters, letters_script, run

from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.policies import make_policy
from dcut_trt.stage_types import DraftTraits
from dcut_trt.types import Request, SamplingParams

MAX_LEN = 48
POLICIES = ("plain", "dflash", "ratio:0.25", "ratio:0.75", "dcut", "auto")
# Costs so close together that dcut's choice changes from step to step.
TRAITS = DraftTraits(7, any_budget=True, short_blocks=True)  # of the scripted drafter
TABLE = CostTable(
    (1,), (0.25, 0.5, 0.75, 1.0), np.array([[10.0, 10.9, 11.0, 11.04]]), np.array([9.0]), "fixed", "never"
)
SPOKEN = [*TOKENIZER.encode(LETTERS + "日"), EOS]
BOS = 257

sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    seed=st.integers(0, 5),
    min_p=st.sampled_from([0.0, 0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.2, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -0.5, 0.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.2, 0.1, 1.0]),
    logit_bias=st.dictionaries(
        st.sampled_from([*SPOKEN, BOS]), st.sampled_from([-100.0, -1.0, 1.0, 30.0]), max_size=3
    ).map(lambda bias: tuple(bias.items())),
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    max_tokens = draw(st.integers(1, 30))
    return Request(
        "r",
        letters(draw(st.text(LETTERS, min_size=1, max_size=30))),
        max_tokens,
        draw(sampling_params),
        stop=draw(st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=2).map(tuple)),
        stop_token_ids=draw(st.sampled_from([(), (), (SPOKEN[0],)])),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, max_tokens)),
        logprobs=draw(st.sampled_from([None, 0, 2, 20])),
        skip_special_tokens=draw(st.booleans()),
    )


def seen(stream: Stream) -> Answer:
    assert stream.error is None
    return Answer(stream.tokens, stream.text, stream.finish, stream.matched, stream.logprobs)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(requests(), st.integers(0, 6)), min_size=1, max_size=5), st.sampled_from(POLICIES), st.data())
def test_any_mixture_equals_plain_decoding_by_definition(
    crowd: list[tuple[Request, int]], policy: str, data: st.DataObject
) -> None:
    script = letters_script()
    engine = scripted_engine(
        make_policy(policy, TABLE, TRAITS),
        script=script,
        max_batch=4,
        max_len=MAX_LEN,
        accuracy=data.draw(st.sampled_from([0.5, 0.9, 1.0])),
    )
    arrivals: dict[int, list[Request]] = {}
    for index, (request, step) in enumerate(crowd):
        arrivals.setdefault(step, []).append(replace(request, request_id=f"r{index}"))
    streams = run(engine, arrivals)
    for index, (request, _) in enumerate(crowd):
        stream = streams[f"r{index}"]
        assert seen(stream) == answer(script, TOKENIZER, request, MAX_LEN)
        assert stream.usage is not None
        assert stream.usage.output_tokens == len(stream.tokens)
        assert stream.usage.accepted <= stream.usage.verified <= stream.usage.drafted
        assert stream.times is not None
        assert stream.times.admitted is not None
        assert stream.times.first_token is not None
        assert stream.times.finished is not None
        assert stream.times.submitted <= stream.times.admitted <= stream.times.first_token <= stream.times.finished
