"""Every field out of range is refused with its name, its value and its limit; the last value inside is taken."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dcut_trt.admission import MAX_STOP_LENGTH, MAX_STOP_STRINGS, blocks_needed, check_request
from dcut_trt.backends.base import Limits
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import InvalidRequest
from dcut_trt.types import Request, SamplingParams

LIMITS = Limits(max_batch=2, max_len=64, draft_length=7, vocab_size=258, block_size=16, num_blocks=10, feature_size=2)
GOOD = Request("r", (1, 2, 3), 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": ""}, r"request_id=''"),
        ({"prompt_ids": ()}, r"prompt=.*at least 1 token"),
        ({"prompt_ids": (1,) * 64}, r"prompt='64 tokens'.*at most 63"),
        ({"prompt_ids": (1, -1)}, r"prompt\.token_ids\[1\]=-1.*\[0, 258\)"),
        ({"prompt_ids": (258,)}, r"prompt\.token_ids\[0\]=258.*\[0, 258\)"),
        ({"prompt_ids": (2**40,)}, r"prompt\.token_ids\[0\]=1099511627776"),
        ({"stop_token_ids": (5, 258)}, r"stop_token_ids\[1\]=258.*\[0, 258\)"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids\[0\]=-1"),
        ({"max_tokens": 0}, r"max_tokens=0.*at least 1"),
        ({"max_tokens": -5}, r"max_tokens=-5.*at least 1"),
        ({"stop": ("a",) * (MAX_STOP_STRINGS + 1)}, r"stop='17 strings'.*at most 16"),
        ({"stop": ("a", "")}, r"stop\[1\]='0 characters'"),
        ({"stop": ("a" * (MAX_STOP_LENGTH + 1),)}, r"stop\[0\]='257 characters'.*256"),
        ({"min_tokens": -1}, r"min_tokens=-1.*\[0, max_tokens=10\]"),
        ({"min_tokens": 11}, r"min_tokens=11.*\[0, max_tokens=10\]"),
        ({"logprobs": -1}, r"logprobs=-1.*\[0, 20\]"),
        ({"logprobs": 21}, r"logprobs=21.*\[0, 20\]"),
        ({"priority": -101}, r"priority=-101.*\[-100, 100\]"),
        ({"priority": 101}, r"priority=101.*\[-100, 100\]"),
    ],
)
def test_a_field_out_of_range_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_request(replace(GOOD, **changes), LIMITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, r"sampling\.temperature=-0\.1"),
        ({"temperature": math.nan}, r"sampling\.temperature=nan"),
        ({"temperature": math.inf}, r"sampling\.temperature=inf"),
        ({"top_k": -1}, r"sampling\.top_k=-1"),
        ({"top_p": 0.0}, r"sampling\.top_p=0\.0.*\(0, 1\]"),
        ({"top_p": 2.0}, r"sampling\.top_p=2\.0.*\(0, 1\]"),
        ({"top_p": math.nan}, r"sampling\.top_p=nan"),
        ({"seed": -1}, r"sampling\.seed=-1"),
        ({"seed": 2**63}, r"sampling\.seed=9223372036854775808"),
        ({"min_p": -0.1}, r"sampling\.min_p=-0\.1.*\[0, 1\]"),
        ({"min_p": 1.1}, r"sampling\.min_p=1\.1.*\[0, 1\]"),
        ({"min_p": math.nan}, r"sampling\.min_p=nan"),
        ({"repetition_penalty": 0.0}, r"sampling\.repetition_penalty=0\.0.*\(0, 2\]"),
        ({"repetition_penalty": 2.1}, r"sampling\.repetition_penalty=2\.1.*\(0, 2\]"),
        ({"repetition_penalty": math.nan}, r"sampling\.repetition_penalty=nan"),
        ({"presence_penalty": -2.1}, r"sampling\.presence_penalty=-2\.1.*\[-2, 2\]"),
        ({"presence_penalty": math.nan}, r"sampling\.presence_penalty=nan"),
        ({"frequency_penalty": 2.1}, r"sampling\.frequency_penalty=2\.1.*\[-2, 2\]"),
        ({"frequency_penalty": math.inf}, r"sampling\.frequency_penalty=inf"),
        ({"logit_bias": ((5, 1.0), (258, 1.0))}, r"sampling\.logit_bias\[1\]=258.*\[0, 258\)"),
        ({"logit_bias": ((-1, 1.0),)}, r"sampling\.logit_bias\[0\]=-1"),
        ({"logit_bias": ((7, 100.5),)}, r"sampling\.logit_bias\[id 7\]=100\.5.*\[-100, 100\]"),
        ({"logit_bias": ((7, math.nan),)}, r"sampling\.logit_bias\[id 7\]=nan"),
        ({"logit_bias": ((7, 1.0), (7, 2.0))}, r"sampling\.logit_bias=7: must name each id once"),
        ({"logit_bias": ((7, 1.0),) * 1025}, r"sampling\.logit_bias='1025 ids'.*1024"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_request(replace(GOOD, sampling=SamplingParams(**changes)), LIMITS)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": (257,) * 63},
        {"max_tokens": 1},
        {"min_tokens": 10, "logprobs": 20, "priority": 100},
        {"logprobs": 0, "priority": -100},
        {"sampling": SamplingParams(min_p=1.0, repetition_penalty=2.0, presence_penalty=2.0, frequency_penalty=2.0)},
        {"sampling": SamplingParams(presence_penalty=-2.0, frequency_penalty=-2.0, logit_bias=((0, 100), (257, -100)))},
        {"max_tokens": 2**40},
        {"stop": ("a" * MAX_STOP_LENGTH,) * MAX_STOP_STRINGS},
        {"stop_token_ids": (0, 257)},
        {"sampling": SamplingParams(1e-9, 10**9, 1.0, 2**63 - 1)},
        {"sampling": SamplingParams(1e9, 1, 1e-9, 0)},
    ],
)
def test_the_last_value_inside_is_taken(changes: dict[str, Any]) -> None:
    check_request(replace(GOOD, **changes), LIMITS)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "blocks"),
    [(3, 6, 1), (3, 7, 2), (9, 1, 2), (20, 37, 4), (20, 38, 5), (63, 1, 5), (3, 10_000, 5)],
)
def test_blocks_hold_the_longest_outcome_and_the_drafts_past_it(prompt: int, max_tokens: int, blocks: int) -> None:
    assert blocks_needed(Request("r", (1,) * prompt, max_tokens), LIMITS) == blocks


def test_a_request_that_no_empty_cache_could_hold_is_refused() -> None:
    scarce = replace(LIMITS, num_blocks=4)
    check_request(Request("r", (1,) * 20, 37), scarce)
    with pytest.raises(InvalidRequest, match=r"max_tokens=38.*5 KV blocks of 16, there are 4"):
        check_request(Request("r", (1,) * 20, 38), scarce)


def test_a_refused_request_leaves_no_trace_in_the_engine() -> None:
    engine = scripted_engine()
    with pytest.raises(InvalidRequest):
        engine.submit(Request("r", (), 10))
    assert not engine.has_work
    engine.submit(Request("r", (1,), 10))
