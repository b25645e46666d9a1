"""The target's own choice after each verified row, with the context that the row really has."""

from __future__ import annotations

import functools

import numpy as np

from dcut_trt.errors import StepFailed
from dcut_trt.logprobs import token_logprob
from dcut_trt.sampling import sample_token
from dcut_trt.sequence import Sequence
from dcut_trt.stage_types import Verified
from dcut_trt.types import FloatArray, IntArray, TokenLogprob


class SequenceChoice:
    """depth -> the token that the target chooses at position len(tokens) + depth of one sequence.

    accept() asks depth by depth and goes on only where the choice equals the draft. So the tokens chosen before are
    exactly the context of the next row, and penalties and min_tokens count them as plain decoding would.
    """

    def __init__(self, choice: TargetChoice, sequence: Sequence, first: int) -> None:
        self.logprobs: list[TokenLogprob] = []  # one per chosen token, when the request wants them
        self._choice = choice
        self._sequence = sequence
        self._first = first
        self._position = len(sequence.tokens)

    def __call__(self, depth: int) -> int:
        request = self._sequence.request
        head, position = self._first + depth, self._position + depth
        token = self._choice.argmax[head]
        if not request.needs_logits:
            if not self._choice.finite(head):
                raise self._fault("hidden states", position)
            return token
        raw = self._choice.logits(head)
        if not np.isfinite(raw.max()):
            raise self._fault("logits", position)
        adjusted = self._sequence.adjuster.adjusted(raw)
        if not request.sampling.greedy or adjusted is not raw:
            token = sample_token(adjusted, request.sampling, self._sequence.seed, position)
        if request.logprobs is not None:
            self.logprobs.append(token_logprob(raw, token, request.logprobs))
        self._sequence.adjuster.add(token)
        return token

    def _fault(self, what: str, position: int) -> StepFailed:
        request_id = self._sequence.request.request_id
        return StepFailed(f"request_id={request_id!r}: the target's {what} at position {position} are not finite")


class TargetChoice:
    """What the target says after each head row: its argmax, and raw logits where they were asked for."""

    def __init__(self, verified: Verified, head_rows: IntArray, logit_rows: IntArray) -> None:
        """head_rows: [H] the packed row of each head; logit_rows: [S] the heads whose logits were asked for."""
        self.argmax: list[int] = verified.argmax.tolist()
        self._logits = verified.logits
        self._logit_of = {head: index for index, head in enumerate(logit_rows.tolist())}
        self._features, self._head_rows = verified.features, head_rows

    def finite(self, head: int) -> bool:
        """Whether the hidden states behind a head row are numbers, as far as the host can see them.

        An argmax over NaN is still some id, and its logit may look sound: runtimes pass over NaN when they compare.
        But a row that is NaN once stays so through all layers, and the drafter's features show it on the way.
        """
        return self._finite is None or self._finite[head]

    @functools.cached_property
    def _finite(self) -> list[bool] | None:
        """Of each head row; None where features stay on a device."""
        features = self._features
        if not isinstance(features, np.ndarray) or not features.shape[1]:
            return None
        # A row's sum is NaN or infinite if any of it is, and costs a fraction of looking at every number.
        with np.errstate(invalid="ignore"):
            sums = features @ np.ones(features.shape[1], features.dtype)
        finite: list[bool] = np.isfinite(sums[self._head_rows]).tolist()
        return finite

    def logits(self, head: int) -> FloatArray:
        """[V] raw logits after a head row that was asked for."""
        row: FloatArray = self._logits[self._logit_of[head]]
        return row

    def after(self, sequence: Sequence, first: int) -> SequenceChoice:
        """The choices of a sequence whose first row is head row `first`."""
        return SequenceChoice(self, sequence, first)
