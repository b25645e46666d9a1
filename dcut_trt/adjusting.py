"""What a request does to the target's raw logits before a token is chosen: bias, min_tokens mask, penalties."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dcut_trt.types import FloatArray, IntArray, SamplingParams


class TokenCounts:
    """Which ids a request has used so far, and how often in its output; adding a token costs the same at any length."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        unique = sorted(set(prompt_ids))
        self._slots = {token_id: slot for slot, token_id in enumerate(unique)}
        self._ids: NDArray[np.int64] = np.array(unique, np.int64)
        self._output_counts: IntArray = np.zeros(len(unique), np.int32)

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            room = slot + 8
            self._ids = np.concatenate((self._ids, np.empty(room, np.int64)))
            self._output_counts = np.concatenate((self._output_counts, np.zeros(room, np.int32)))
        self._ids[slot] = token_id
        self._output_counts[slot] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """[U] the different ids of prompt and output, in order of first use after those of the prompt."""
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> IntArray:
        """[U] how often each of `ids` stands in the output."""
        return self._output_counts[: len(self._slots)]


def penalise(logits: FloatArray, sampling: SamplingParams, counts: TokenCounts) -> None:
    """Penalties on [V] logits, in place: repetition over prompt and output, then frequency and presence over output."""
    if not sampling.penalises:
        return
    used, occurrences = logits[counts.ids], counts.output_counts
    repetition = np.float32(sampling.repetition_penalty)
    used = np.where(used > 0, used / repetition, used * repetition)
    used -= np.float32(sampling.frequency_penalty) * occurrences.astype(np.float32)
    used -= np.float32(sampling.presence_penalty) * (occurrences > 0)
    logits[counts.ids] = used


class LogitAdjuster:
    """The adjustments of one request, as its output grows.

    Order: logit bias, then the mask of every id that would end the output before min_tokens, then the penalties.
    """

    def __init__(
        self, prompt_ids: Iterable[int], sampling: SamplingParams, min_tokens: int, stop_ids: Iterable[int]
    ) -> None:
        self._sampling = sampling
        self._bias_ids = np.array([token_id for token_id, _ in sampling.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self._min_tokens = min_tokens
        self._counts = TokenCounts(prompt_ids if sampling.penalises else ())
        self._output_length = 0

    def add(self, token_id: int) -> None:
        """One more output token."""
        self._output_length += 1
        if self._sampling.penalises:
            self._counts.add(token_id)

    def adjusted(self, logits: FloatArray) -> FloatArray:
        """[V] logits for the next output token; the raw ones are left as they are."""
        masked = self._output_length < self._min_tokens and len(self._stop_ids) > 0
        if not (masked or len(self._bias_ids) or self._sampling.penalises):
            return logits
        changed = logits.astype(np.float32)  # always a copy
        changed[self._bias_ids] += self._bias
        if masked:
            changed[self._stop_ids] = -np.inf
        penalise(changed, self._sampling, self._counts)
        return changed
