"""State of one live request. commit() is the only place where tokens are appended, cut and counted."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import numpy as np

from dcut_trt.adjusting import LogitAdjuster
from dcut_trt.detokenizer import Detokenizer
from dcut_trt.stage_types import FeatureRows
from dcut_trt.stopping import find_stop, held_length
from dcut_trt.types import Commit, FinishReason, IntArray, Request, RequestTimes, TokenLogprob, Usage

_NO_BLOCKS: IntArray = np.empty(0, np.int32)


class Sequence:
    """One request between admission and its last commit.

    #  tokens:   p0 p1 ... pn  o0 o1 ... a      the last one is the anchor: committed, not yet computed
    #  KV rows:  [------ kv_len ------]         of the target; rows after it are overwritten before they are read
    #  context:  [-- context_len --][pending]   of the drafter: rows in its cache, features still to be given to it
    """

    def __init__(
        self, request: Request, seed: int, max_len: int, eos_ids: tuple[int, ...], detokenizer: Detokenizer
    ) -> None:
        self.request = request
        self.seed = seed
        self.tokens: list[int] = list(request.prompt_ids)
        self.prompt_length = len(request.prompt_ids)
        self.block_table: IntArray = _NO_BLOCKS  # filled when the scheduler lets it run
        self.submitted = 0.0  # seconds on the engine's clock
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.kv_len = 0
        self.context_len = 0
        self.cached_tokens = 0
        self._features: list[FeatureRows] = []
        self._output_limit = min(request.max_tokens, max_len - self.prompt_length)
        self._stop_ids = frozenset(request.stop_token_ids + (() if request.ignore_eos else eos_ids))
        self.adjuster = LogitAdjuster(request.prompt_ids, request.sampling, request.min_tokens, self._stop_ids)
        self._matched: str | int | None = None
        self._detokenizer = detokenizer
        self._text = ""  # everything decoded
        self._shown = 0  # how much of it has been streamed
        self._searched_from = 0  # stop strings are not looked for before this place
        self._steps = self._drafted = self._verified = self._accepted = 0

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def pending_rows(self) -> int:
        """Feature rows that wait for the drafter."""
        return self.kv_len - self.context_len

    @property
    def usage(self) -> Usage:
        return Usage(
            self.prompt_length,
            self.output_length,
            self._steps,
            self._drafted,
            self._verified,
            self._accepted,
            self.cached_tokens,
        )

    def times(self, finished: float) -> RequestTimes:
        """Of a request that ends at `finished`, a time as the others."""
        return RequestTimes(self.submitted, self.admitted, self.first_token, finished)

    def admit(self, block_table: IntArray, cached_rows: int, now: float) -> None:
        """Let it run; both caches hold its first rows already, from a request with the same first tokens."""
        self.block_table, self.admitted = block_table, now
        self.kv_len = self.context_len = self.cached_tokens = cached_rows

    def computed(self, rows: int, features: FeatureRows | None) -> None:
        """Count rows that the target computed and that belong to committed tokens; keep their features [rows, F]."""
        self.kv_len += rows
        if features is not None:
            self._features.append(features)

    def take_features(self) -> tuple[FeatureRows, ...]:
        """Features for positions context_len .. kv_len - 1, piece by piece; part of the context from now on."""
        taken = tuple(self._features)
        self._features.clear()
        assert sum(map(len, taken)) == self.pending_rows, "the drafter's context has a hole"
        self.context_len = self.kv_len
        return taken

    def commit(
        self,
        tokens: Ids[int],
        drafted: int = 0,
        verified: int = 0,
        logprobs: Ids[TokenLogprob] = (),
        now: float = 0.0,
    ) -> Commit:
        """Append the tokens of one step up to the first end: EOS or stop id, stop string, then length.

        tokens: accepted drafts and the target's own next token.  drafted, verified: drafts proposed and kept.
        logprobs: one per token, or none.  now: seconds on the engine's clock.
        """
        emitted: list[int] = []
        finish: FinishReason | None = None
        for token in tokens:
            emitted.append(token)
            self.tokens.append(token)
            finish = self._end_at(token)
            if finish is not None:
                break
        if not self.request.stop:
            self._decode([token for token in emitted if token not in self._stop_ids])
        if finish is not None:
            finish = self._flush(finish)
        if self.first_token is None:
            self.first_token = now
        accepted = min(len(emitted), len(tokens) - 1)
        self._steps += 1
        self._drafted += drafted
        self._verified += verified
        self._accepted += accepted
        return Commit(
            self.request.request_id,
            tuple(emitted),
            self._take_delta(finish),
            finish,
            drafted,
            verified,
            accepted,
            tuple(logprobs[: len(emitted)]),
            self._matched,
        )

    def _end_at(self, token: int) -> FinishReason | None:
        if token in self._stop_ids:
            self._matched = token
            return FinishReason.STOP
        if self.request.stop:  # only stop strings need the text after every single token
            self._decode([token])
            if self.output_length <= self.request.min_tokens:
                self._searched_from = len(self._text)
            if self._cut_at_stop():
                return FinishReason.STOP
        return FinishReason.LENGTH if self.output_length >= self._output_limit else None

    def _decode(self, ids: Ids[int]) -> None:
        self._text += self._detokenizer.push(ids)

    def _cut_at_stop(self) -> bool:
        """Cut the text before the earliest stop string in it."""
        if not self.request.stop:
            return False
        found = find_stop(self._text, self.request.stop, max(self._shown, self._searched_from))
        if found is None:
            return False
        end, self._matched = found
        self._text = self._text[:end]
        self._detokenizer = Detokenizer(lambda _: "")  # nothing held back may follow the cut
        return True

    def _flush(self, finish: FinishReason) -> FinishReason:
        """Show what was held back; an incomplete character may still complete a stop string."""
        self._text += self._detokenizer.flush()
        searchable = self.output_length > self.request.min_tokens
        return FinishReason.STOP if searchable and self._cut_at_stop() else finish

    def _take_delta(self, finish: FinishReason | None) -> str:
        held = 0 if finish is not None else held_length(self._text, self.request.stop, self._searched_from)
        delta = self._text[self._shown : len(self._text) - held]
        self._shown += len(delta)
        return delta
