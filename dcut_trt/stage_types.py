"""The frozen values that pass between the stages of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dcut_trt.types import FloatArray, IntArray


class FeatureRows(Protocol):
    """Feature rows [n, F] that live where the target runs: numpy arrays, or a device backend's own handle."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> FeatureRows: ...

    def copy(self) -> Self: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed ragged rows for one target call, with the KV blocks they belong to.

    #  packed row:      0    1    2    3    4    5    6        K = 7
    #  request:         a    a    a    b    c    c    c        cu_lens = [0, 3, 4, 7]
    #  position:      P_a  +1   +2   P_b  P_c   +1   +2        past_lens = [P_a, P_b, P_c]

    token_ids, positions: [K].  past_lens: [B] tokens already cached.  cu_lens: [B + 1].
    block_tables: one array of KV block ids per request, long enough for its last row.
    resident: a backend's own handle on rows that it packed itself and that never left its device; token_ids and
        positions are empty then, and nobody reads cu_lens.
    prompt: the rows are parts of prompts; the other requests that run are not among them.
    """

    token_ids: IntArray
    positions: IntArray
    past_lens: IntArray
    cu_lens: IntArray
    block_tables: tuple[IntArray, ...]
    resident: object = None
    prompt: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """The ratios that a policy lets compete, and what a step of each costs; one ratio leaves no choice.

    ratios: [R] in (0, 1].  cost_ms: [R], finite and positive.
    """

    ratios: tuple[float, ...]
    cost_ms: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DraftTraits:
    """What the loaded networks allow a policy to ask for.

    draft_length: D.  any_budget: the target runs any number K of rows; else only the buckets it was built for.
    short_blocks: the drafter can draft the first d < D tokens of a block for less, and drafts the same tokens then.
    """

    draft_length: int
    any_budget: bool = False
    short_blocks: bool = False


@dataclass(frozen=True, slots=True)
class BatchView:
    """What a policy may know of the requests of a step before they draft.

    request_ids: [B].  context_lens: [B] rows in the target's cache.  pending_rows: [B] feature rows that the drafter
    takes up when it drafts next.  temperatures: [B].  last_tokens: [B, 2] the last two tokens of each request so far,
    the second being the block's anchor; None where nobody knows the words, as in a simulation.
    after_prompt: the step before computed prompts, so this one runs another number of rows whatever it does.
    filling: requests that will decode too once their prompts are computed, in steps between these.
    """

    request_ids: tuple[str, ...]
    context_lens: IntArray
    pending_rows: IntArray
    temperatures: FloatArray
    last_tokens: IntArray | None = None
    after_prompt: bool = False
    filling: int = 0

    @property
    def batch(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class Intent:
    """Who drafts in a step, and how far.

    depth: tokens of each block, 1..D where the drafter allows short blocks; None is the whole block, 0 no drafting.
    rows: [b] ascending places in the batch of those that draft; None is all.
    """

    depth: int | None = None
    rows: IntArray | None = None


@dataclass(frozen=True, slots=True)
class DraftInput:
    """What the drafter needs for one block per request.

    anchors: [B] the last committed token of each request; it sits at position past + new context rows.
    context_lens: [B] rows of the drafter's cache that are already filled.
    features: per request the pieces, one after the other, of target features [new_i, F] for positions
        context_lens[i] .. context_lens[i] + new_i - 1.
    block_tables: as in Rows.
    offer: what a backend that selects and packs on its device is to choose from; None when the policy selects.
    feed_only: the features are to be appended, and nobody reads the drafts.
    depth: tokens to draft, 1..D; less than D only where the drafter allows short blocks. None is D.
    """

    anchors: IntArray
    context_lens: IntArray
    features: tuple[tuple[FeatureRows, ...], ...]
    block_tables: tuple[IntArray, ...]
    offer: Offer | None = None
    feed_only: bool = False
    depth: int | None = None


class Plan(Protocol):
    """Which drafts are verified. PackPlan on the host; a device backend has its own, read back when first asked for.

    keep: [B] drafts kept per request.  request_rows: [K].  cu_lens: [B + 1].  size: K.
    ratio: the chosen fraction of all B * (D + 1) positions, None where the policy has no ratio.
    """

    @property
    def keep(self) -> IntArray: ...

    @property
    def request_rows(self) -> IntArray: ...

    @property
    def cu_lens(self) -> IntArray: ...

    @property
    def ratio(self) -> float | None: ...

    @property
    def size(self) -> int: ...

    def drafts_of(self, row: int) -> list[int]: ...

    def rows(self, past_lens: IntArray, block_tables: tuple[IntArray, ...]) -> Rows: ...


@dataclass(frozen=True, slots=True)
class Draft:
    """tokens, confidence: [B, D]; confidence is the drafter's probability of the drafted token, in [0, 1].

    plan: set by a backend that has selected and packed already; tokens and confidence may be empty then.
    margin: [B, D] by how much that probability exceeds the next best token's; None from a drafter that does not tell.
    """

    tokens: IntArray
    confidence: FloatArray
    plan: Plan | None = None
    margin: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """keep: [b] drafts to verify of each request that drafted.  ratio: the fraction of positions aimed at, None without
    one.  log_scores: [b, depth + 1] what the drafts were ranked by, None where nothing was ranked.
    """

    keep: IntArray
    ratio: float | None
    log_scores: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class PackPlan:
    """A Plan whose rows are packed on the host (layout as in Rows, depth 0 is the anchor).

    token_ids, request_rows, depths: [K].
    """

    keep: IntArray
    token_ids: IntArray
    request_rows: IntArray
    depths: IntArray
    cu_lens: IntArray
    ratio: float | None

    @property
    def size(self) -> int:
        """K, the number of rows that the target will compute."""
        return int(self.cu_lens[-1])

    def drafts_of(self, row: int) -> list[int]:
        """The kept drafts of one request."""
        first = int(self.cu_lens[row])
        return [int(token) for token in self.token_ids[first + 1 : first + 1 + int(self.keep[row])]]

    def rows(self, past_lens: IntArray, block_tables: tuple[IntArray, ...]) -> Rows:
        """The rows to compute when request i has past_lens[i] rows in the cache."""
        positions = past_lens[self.request_rows] + self.depths
        return Rows(self.token_ids, positions, past_lens, self.cu_lens, block_tables)


@dataclass(frozen=True, slots=True)
class Verified:
    """The target's answer for H head rows. A device backend reads argmax and logits back when first asked for.

    argmax: [H] the greedy token after each head row.
    features: [K, F] hidden states of the drafter's target layers for every row, F = layers * hidden.
    logits: [S, V] raw logits of the requested rows only; S = 0 when every row is greedy.
    """

    argmax: IntArray
    features: FeatureRows
    logits: FloatArray


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a decoding step turned out to be, for the policy that chose it.

    draft, selection: of the requests that drafted; None when none did, or when the device selected.
    keep: [B] drafts verified.  accepted: [B] drafts accepted.  judged: [B] leading drafts of which it is known whether
    they were accepted: one more than accepted after a rejection, fewer when the request ended or failed.
    rows: K.  draft_ms, verify_ms, step_ms: milliseconds.
    """

    view: BatchView
    intent: Intent
    draft: Draft | None
    selection: Selection | None
    keep: IntArray
    accepted: IntArray
    judged: IntArray
    rows: int
    draft_ms: float
    verify_ms: float
    step_ms: float
