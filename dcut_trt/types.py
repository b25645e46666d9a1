"""Requests, and what is told of them: the frozen values that outlive a step."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # end-of-sequence id, stop id or stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's token is chosen at every position. temperature 0 is greedy.

    temperature: >= 0, finite.  top_k: 0 (off) or >= 1.  top_p: in (0, 1].  min_p: in [0, 1], relative to the best.
    seed: 0 <= seed < 2**63; None draws one when the request is admitted.
    repetition_penalty: in (0, 2], over prompt and output: positive logits are divided, negative ones multiplied.
    presence_penalty, frequency_penalty: in [-2, 2], over the output: taken off once, and once per occurrence.
    logit_bias: (token id, bias in [-100, 100]), each id once.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on the tokens before it beyond what the model itself computes."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request, already tokenized.

    deadline: seconds on the engine's monotonic clock after which the request is dropped.
    min_tokens: output tokens before which neither EOS, nor a stop id, nor a stop string can end the request.
    logprobs: None, or how many of the most probable tokens to report beside each emitted one (0 to 20).
    priority: -100 to 100; among waiting requests the larger runs first.
    skip_special_tokens: hide special tokens in the text. The stop id or end-of-sequence id that ends a request is
        never part of the text, whatever this says; it is the last of the emitted ids.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    deadline: float | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    priority: int = 0
    skip_special_tokens: bool = True

    @property
    def needs_logits(self) -> bool:
        """Whether the target's argmax alone cannot answer it."""
        sampling = self.sampling
        reshaped = sampling.penalises or bool(sampling.logit_bias) or self.min_tokens > 0
        return not sampling.greedy or reshaped or self.logprobs is not None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log of the target's raw probability (before temperature, penalties and bias) of an emitted token.

    top: the most probable (token id, logprob) at that position, best first, ties by id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened to a request, in seconds on the engine's monotonic clock; None while they have not."""

    submitted: float
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """What one step added to one request; usage, metrics, KV lengths and text all derive from it.

    tokens: emitted ids, already cut at end-of-sequence, stop or length.
    text: newly stable text.  drafted, verified, accepted: draft tokens proposed, sent to the target, emitted.
    logprobs: one per emitted token when the request asked for them.
    matched: the stop string, stop id or end-of-sequence id that ended the request.
    """

    request_id: str
    tokens: tuple[int, ...]
    text: str
    finish: FinishReason | None
    drafted: int
    verified: int
    accepted: int
    logprobs: tuple[TokenLogprob, ...] = ()
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of one request so far. drafted = pruned + verified; accepted <= verified.

    cached_tokens: prompt tokens whose KV rows were found in the prefix cache.
    """

    prompt_tokens: int
    output_tokens: int
    steps: int
    drafted: int
    verified: int
    accepted: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One message of a stream: a delta, and on the last one the finish reason or the error.

    logprobs, matched: as in Commit.  times: on the last one only.
    """

    request_id: str
    tokens: tuple[int, ...]
    text: str
    usage: Usage
    finish: FinishReason | None = None
    error: Exception | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    matched: str | int | None = None
    times: RequestTimes | None = None

    @property
    def final(self) -> bool:
        return self.finish is not None or self.error is not None
