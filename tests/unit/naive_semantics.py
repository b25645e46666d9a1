"""What a request must give, by definition: one token after the other, everything counted and decoded anew."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from dcut_trt.backends.scripted import Script
from dcut_trt.detokenizer import REPLACEMENT
from dcut_trt.logprobs import token_logprob
from dcut_trt.sampling import sample_token
from dcut_trt.tokenizer import Tokenizer
from dcut_trt.types import FinishReason, FloatArray, Request, SamplingParams, TokenLogprob


@dataclass(frozen=True)
class Answer:
    """All that a client sees, apart from how it was cut into messages."""

    tokens: list[int]
    text: str
    finish: FinishReason | None
    matched: str | int | None
    logprobs: list[TokenLogprob]


def adjusted_by_definition(
    logits: FloatArray, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], masked: Set[int]
) -> FloatArray:
    """Every id that anything names, in turn: bias, mask, repetition, frequency, presence."""
    adjusted = logits.copy()
    bias = dict(sampling.logit_bias)
    for token in {*bias, *masked, *prompt, *output}:
        value = np.float32(logits[token] + np.float32(bias.get(token, 0.0)))
        if token in masked:
            value = np.float32(-np.inf)
        if token in prompt or token in output:
            factor = np.float32(sampling.repetition_penalty)
            value = value / factor if value > 0 else value * factor
        occurrences = np.float32(output.count(token))
        value = value - np.float32(sampling.frequency_penalty) * occurrences
        adjusted[token] = value - np.float32(sampling.presence_penalty) * np.float32(occurrences > 0)
    return adjusted


def answer(script: Script, tokenizer: Tokenizer, request: Request, max_len: int) -> Answer:
    """Plain decoding of the script."""
    stop_ids = {*request.stop_token_ids, *(() if request.ignore_eos else tokenizer.eos_ids)}
    output: list[int] = []
    logprobs: list[TokenLogprob] = []

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens)

    def ended(text: str, finish: FinishReason, matched: str | int | None) -> Answer:
        return Answer(output, text, finish, matched, logprobs)

    while True:
        prefix = [*request.prompt_ids, *output]
        raw = script.logits[script.state(prefix)]
        mask = stop_ids if len(output) < request.min_tokens else set()
        adjusted = adjusted_by_definition(raw, request.sampling, request.prompt_ids, output, mask)
        output.append(sample_token(adjusted, request.sampling, request.sampling.seed or 0, len(prefix)))
        if request.logprobs is not None:
            logprobs.append(token_logprob(raw, output[-1], request.logprobs))
        if output[-1] in stop_ids:
            return ended(decode(output[:-1]), FinishReason.STOP, output[-1])
        text = decode(output)
        start = len(decode(output[: request.min_tokens]).rstrip(REPLACEMENT))
        found = [(text.index(stop, start), stop) for stop in request.stop if stop in text[start:]]
        if found and len(output) > request.min_tokens:
            place, stop = min(found, key=lambda pair: pair[0])
            return ended(text[:place], FinishReason.STOP, stop)
        if len(output) == request.max_tokens or len(prefix) + 1 == max_len:
            return ended(text, FinishReason.LENGTH, None)
