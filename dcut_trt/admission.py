"""Checks on a request before it takes anything: every refusal names field, value and limit."""

from __future__ import annotations

import math

from dcut_trt.backends.base import Limits
from dcut_trt.errors import InvalidRequest
from dcut_trt.types import Request, SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_PRIORITY = 100


def check_request(request: Request, limits: Limits) -> None:
    """Raises InvalidRequest for the first field that is out of range."""
    if not request.request_id:
        raise InvalidRequest("request_id", request.request_id, "must not be empty")
    prompt_limit = limits.max_len - 1
    if not request.prompt_ids:
        raise InvalidRequest("prompt", "", "must hold at least 1 token")
    if len(request.prompt_ids) > prompt_limit:
        raise InvalidRequest("prompt", f"{len(request.prompt_ids)} tokens", f"must be at most {prompt_limit} tokens")
    _check_ids("prompt.token_ids", request.prompt_ids, limits.vocab_size)
    _check_ids("stop_token_ids", request.stop_token_ids, limits.vocab_size)
    if request.max_tokens < 1:
        raise InvalidRequest("max_tokens", request.max_tokens, "must be at least 1")
    if not 0 <= request.min_tokens <= request.max_tokens:
        raise InvalidRequest("min_tokens", request.min_tokens, f"must be in [0, max_tokens={request.max_tokens}]")
    if request.logprobs is not None:
        _check_range("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    _check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_stop(request.stop)
    check_sampling(request.sampling)
    _check_bias(request.sampling.logit_bias, limits.vocab_size)
    blocks = blocks_needed(request, limits)
    if blocks > limits.num_blocks:
        limit = f"prompt and output need {blocks} KV blocks of {limits.block_size}, there are {limits.num_blocks}"
        raise InvalidRequest("max_tokens", request.max_tokens, limit)


def blocks_needed(request: Request, limits: Limits) -> int:
    """KV blocks for a request's longest outcome, and for the up to D rejected drafts written past it."""
    rows = min(len(request.prompt_ids) + request.max_tokens, limits.max_len) + limits.draft_length
    return -(-rows // limits.block_size)


def check_sampling(sampling: SamplingParams) -> None:
    """Raises InvalidRequest for the first sampling field that is out of range."""
    if not math.isfinite(sampling.temperature) or sampling.temperature < 0:
        raise InvalidRequest("sampling.temperature", sampling.temperature, "must be finite and at least 0")
    if sampling.top_k < 0:
        raise InvalidRequest("sampling.top_k", sampling.top_k, "must be 0 (off) or at least 1")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest("sampling.top_p", sampling.top_p, "must be in (0, 1]")
    if sampling.seed is not None and not 0 <= sampling.seed < 2**63:
        raise InvalidRequest("sampling.seed", sampling.seed, "must be in [0, 2**63)")
    _check_range("sampling.min_p", sampling.min_p, 0, 1)
    if not 0 < sampling.repetition_penalty <= 2:
        raise InvalidRequest("sampling.repetition_penalty", sampling.repetition_penalty, "must be in (0, 2]")
    _check_range("sampling.presence_penalty", sampling.presence_penalty, -2, 2)
    _check_range("sampling.frequency_penalty", sampling.frequency_penalty, -2, 2)


def _check_range(field: str, value: float, low: int, high: int) -> None:
    if not low <= value <= high:  # NaN is in no range
        raise InvalidRequest(field, value, f"must be in [{low}, {high}]")


def _check_bias(logit_bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest("sampling.logit_bias", f"{len(logit_bias)} ids", f"must be at most {MAX_LOGIT_BIAS} ids")
    _check_ids("sampling.logit_bias", tuple(token_id for token_id, _ in logit_bias), vocab_size)
    seen: set[int] = set()
    for token_id, bias in logit_bias:
        _check_range(f"sampling.logit_bias[id {token_id}]", bias, -100, 100)
        if token_id in seen:
            raise InvalidRequest("sampling.logit_bias", token_id, "must name each id once")
        seen.add(token_id)


def _check_ids(field: str, ids: tuple[int, ...], vocab_size: int) -> None:
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{field}[{index}]", token_id, f"must be in [0, {vocab_size})")


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"{len(stop)} strings", f"must be at most {MAX_STOP_STRINGS}")
    for index, text in enumerate(stop):
        if not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"stop[{index}]", f"{len(text)} characters", f"must have 1 to {MAX_STOP_LENGTH} characters"
            )
