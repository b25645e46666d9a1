"""Runs of the scripted engine step by step, and what each request must give, straight from the script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from dcut_trt.backends.scripted import Script, byte_tokenizer, scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.sampling import sample_token
from dcut_trt.spec.packing import budget
from dcut_trt.types import FinishReason, Request, RequestTimes, StepEvent, TokenLogprob, Usage

TOKENIZER = byte_tokenizer()
EOS = 256
LETTERS = "abc "
POLICIES = ("plain", "dflash", "ratio:0.25", "ratio:0.5", "ratio:0.75", "ratio:1")


@cache
def letters_script(mean_length: float = 40.0) -> Script:
    """A script that speaks four letters and three raw bytes, so that stop strings and broken characters are common."""
    script = Script(258, EOS, mean_length, seed=5)
    spoken = [*TOKENIZER.encode(LETTERS + "日"), EOS]
    silent = np.setdiff1d(np.arange(script.vocab_size), spoken)
    script.logits[:, silent] = -30.0
    script.argmax[:] = script.logits.argmax(axis=1)
    return script


def letters(text: str) -> tuple[int, ...]:
    """Ids of a text."""
    return tuple(TOKENIZER.encode(text))


def requests(number: int, max_tokens: int = 40) -> list[Request]:
    """Greedy requests r0, r1, ... with prompts of their own."""
    return [Request(f"r{index}", letters(f"prompt {index}"), max_tokens) for index in range(number)]


@dataclass
class Stream:
    """What a client sees of one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    steps: int = 0
    finish: FinishReason | None = None
    error: Exception | None = None
    usage: Usage | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    matched: str | int | None = None
    times: RequestTimes | None = None

    def add(self, event: StepEvent) -> None:
        assert self.finish is None
        assert self.error is None, "an event after the last one"
        self.tokens.extend(event.tokens)
        self.text += event.text
        self.steps += 1
        self.finish, self.error, self.usage = event.finish, event.error, event.usage
        self.logprobs.extend(event.logprobs)
        self.matched, self.times = event.matched, event.times

    @property
    def outcome(self) -> tuple[list[int], str, FinishReason | None]:
        return self.tokens, self.text, self.finish


Streams = dict[str, Stream]


def expected(script: Script, request: Request, max_len: int = 256) -> tuple[list[int], str, FinishReason]:
    """Tokens, text and reason of a request: one token after the other, the whole text decoded anew each time."""
    stop_ids = {*request.stop_token_ids, *(() if request.ignore_eos else (EOS,))}
    output: list[int] = []
    while True:
        prefix = [*request.prompt_ids, *output]
        logits = script.logits[script.state(prefix)]
        output.append(sample_token(logits, request.sampling, request.sampling.seed or 0, len(prefix)))
        if output[-1] in stop_ids:
            return output, TOKENIZER.decode(output[:-1]), FinishReason.STOP
        text = TOKENIZER.decode(output)
        found = [text.index(stop) for stop in request.stop if stop in text]
        if found:
            return output, text[: min(found)], FinishReason.STOP
        if len(output) == request.max_tokens or len(prefix) + 1 == max_len:
            return output, text, FinishReason.LENGTH


def run(
    engine: Engine,
    arrivals: Mapping[int, Sequence[Request]],
    cancels: Mapping[int, Sequence[str]] | None = None,
) -> Streams:
    """Step the engine until everything has ended; requests arrive and are cancelled before the given steps.

    Checks the engine's invariants and the rows of every target call on the way.
    """
    cancels = cancels or {}
    streams: Streams = {}
    last = max([*arrivals, *cancels])
    step = 0
    while step <= last or engine.has_work:
        for request in arrivals.get(step, ()):
            engine.submit(request)
            streams[request.request_id] = Stream()
        for request_id in cancels.get(step, ()):
            engine.cancel(request_id)
        for event in checked_step(engine):
            streams[event.request_id].add(event)
        step += 1
        assert step < 20_000, "the engine does not come to an end"
    assert engine.free_blocks == engine.scheduler.pool.num_blocks
    assert not engine.scheduler.live_ids()
    return streams


def checked_step(engine: Engine) -> list[StepEvent]:
    """One step; the target must have computed exactly the rows that the policy pays for."""
    before = engine.trace.totals.steps
    calls: list[int] = engine.target.calls  # type: ignore[attr-defined]
    called = len(calls)
    events = engine.step()
    engine.scheduler.check_invariants()
    assert len(calls) - called == engine.trace.totals.steps - before
    if len(calls) > called:
        record = engine.trace.records[-1]
        assert calls[-1] == record.rows
        if record.kind == "decode":
            block = engine.limits.draft_length + 1
            packed = record.batch + record.kept
            planned = packed if record.ratio is None else budget(record.ratio, record.batch, block)
            if record.ratio is None and any(event.error for event in events):
                assert record.rows >= planned  # what was kept of a request that failed is in no record
            else:
                assert record.rows == planned
    return events


def run_all(engine: Engine, *requests: Request) -> Streams:
    """Run requests that arrive together."""
    return run(engine, {0: requests})


def run_alone(request: Request, script: Script, max_len: int = 256) -> Stream:
    """What a request gives alone, without speculation."""
    engine = scripted_engine("plain", script=script, max_batch=1, max_len=max_len)
    return run_all(engine, request)[request.request_id]
