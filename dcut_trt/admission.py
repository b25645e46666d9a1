"""Checks on a request before it takes anything: every refusal names field, value and limit."""

from __future__ import annotations

import math

from dcut_trt.backends.base import Limits
from dcut_trt.errors import InvalidRequest
from dcut_trt.types import Request, SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256


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
    _check_stop(request.stop)
    check_sampling(request.sampling)
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
