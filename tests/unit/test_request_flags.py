"""dcut-trt generate hands every option of a request to the engine, and prints log probabilities to stderr."""

from __future__ import annotations

import argparse

import pytest

from dcut_server.cli_generate import add_generate_parser, generate, request_of
from dcut_server.report import logprob_lines
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import InvalidRequest
from dcut_trt.types import Request, SamplingParams, TokenLogprob

FLAGS = [
    *("--min-p=0.1", "--repetition-penalty=1.2", "--presence-penalty=0.5", "--frequency-penalty=-0.5"),
    *("--min-tokens=12", "--logprobs=2", "--raw", "--max-tokens=20"),
]


def parsed(*flags: str) -> Request:
    parser = argparse.ArgumentParser()
    add_generate_parser(parser.add_subparsers())
    return request_of(parser.parse_args(["generate", "bundle", "Hello", *flags]), scripted_engine().tokenizer, "Hello")


def test_every_flag_reaches_the_request() -> None:
    request = parsed(*FLAGS)
    assert request.sampling == SamplingParams(
        min_p=0.1, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5
    )
    assert (request.min_tokens, request.logprobs) == (12, 2)
    logprobs = [entry for event in generate(scripted_engine(), request) for entry in event.logprobs]
    assert len(logprob_lines(logprobs)) == len(logprobs) >= 12


def test_a_flag_out_of_range_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens=30: must be in \[0, max_tokens=20\]"):
        list(generate(scripted_engine(), parsed("--min-tokens=30", "--max-tokens=20")))


def test_a_line_of_logprobs() -> None:
    entry = TokenLogprob(7, -0.5, ((7, -0.5), (3, -2.25)))
    assert logprob_lines([entry]) == ["7 -0.5000 | 7 -0.5000, 3 -2.2500"]
