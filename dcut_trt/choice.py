"""The target's own choice after each verified row, with the context that the row really has."""

from __future__ import annotations

import numpy as np

from dcut_trt.errors import StepFailed
from dcut_trt.logprobs import token_logprob
from dcut_trt.sampling import sample_token
from dcut_trt.sequence import Sequence
from dcut_trt.types import FloatArray, IntArray, TokenLogprob, Verified


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
        token = self._choice.argmax[self._first + depth]
        if not request.needs_logits:
            return token
        raw, position = self._choice.logits(self._first + depth), self._position + depth
        peak = float(raw.max())
        if not np.isfinite(peak):
            raise StepFailed(f"the target's logits at position {position} are not finite (maximum {peak})")
        adjusted = self._sequence.adjuster.adjusted(raw)
        if not request.sampling.greedy or adjusted is not raw:
            token = sample_token(adjusted, request.sampling, self._sequence.seed, position)
        if request.logprobs is not None:
            self.logprobs.append(token_logprob(raw, token, request.logprobs))
        self._sequence.adjuster.add(token)
        return token


class TargetChoice:
    """What the target says after each head row: its argmax, and raw logits where they were asked for."""

    def __init__(self, verified: Verified, logit_rows: IntArray) -> None:
        self.argmax: list[int] = verified.argmax.tolist()
        self._logits = verified.logits
        self._logit_of = {head: index for index, head in enumerate(logit_rows.tolist())}

    def logits(self, head: int) -> FloatArray:
        """[V] raw logits after a head row that was asked for."""
        row: FloatArray = self._logits[self._logit_of[head]]
        return row

    def after(self, sequence: Sequence, first: int) -> SequenceChoice:
        """The choices of a sequence whose first row is head row `first`."""
        return SequenceChoice(self, sequence, first)
