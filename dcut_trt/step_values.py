"""The values that pass between a step's stages: what the networks and the policy are given, and told after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcut_trt.metrics import PrefixLookups
from dcut_trt.scheduler import PrefillPart
from dcut_trt.sequence import Sequence as LiveSequence
from dcut_trt.stage_types import BatchView, Draft, DraftInput, Intent, Offer, Plan, Rows, Selection, StepOutcome
from dcut_trt.types import Commit, IntArray

Live = Sequence[LiveSequence]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a decoding step is going to verify, and why. draft, selection: None when nobody drafted, or when the device
    selected."""

    view: BatchView
    intent: Intent
    draft: Draft | None
    selection: Selection | None
    plan: Plan


def view_of(sequences: Live, *, after_prompt: bool = False, filling: int = 0) -> BatchView:
    """The batch as a policy sees it."""
    return BatchView(
        request_ids=tuple(sequence.request.request_id for sequence in sequences),
        context_lens=np.array([sequence.kv_len for sequence in sequences], np.int32),
        pending_rows=np.array([sequence.pending_rows for sequence in sequences], np.int32),
        temperatures=np.array([sequence.request.sampling.temperature for sequence in sequences], np.float32),
        last_tokens=np.array([sequence.tokens[-2:] for sequence in sequences], np.int32),
        after_prompt=after_prompt,
        filling=filling,
    )


def split(sequences: Live, intent: Intent) -> tuple[Live, Live]:
    """Those that are to draft, and the others."""
    if intent.depth == 0:
        return (), sequences
    if intent.rows is None:
        return sequences, ()
    drafting = set(intent.rows.tolist())
    others = [sequence for row, sequence in enumerate(sequences) if row not in drafting]
    return [sequences[row] for row in intent.rows.tolist()], others


def drafted_each(intent: Intent, batch: int, draft_length: int) -> list[int]:
    """Drafts proposed to each request."""
    depth = draft_length if intent.depth is None else intent.depth
    drafting = range(batch) if intent.rows is None else intent.rows.tolist()
    drafted = [0] * batch
    for row in drafting:
        drafted[row] = depth
    return drafted


def draft_input(
    sequences: Live, offer: Offer | None = None, *, depth: int | None = None, feed_only: bool = False
) -> DraftInput:
    """Anchors are the first tokens that the target has not computed; taking the features empties the queue of each."""
    return DraftInput(
        anchors=np.array([sequence.tokens[sequence.kv_len] for sequence in sequences], np.int32),
        context_lens=np.array([sequence.context_len for sequence in sequences], np.int32),
        features=tuple(sequence.take_features() for sequence in sequences),
        block_tables=tuple(sequence.block_table for sequence in sequences),
        offer=offer,
        feed_only=feed_only,
        depth=depth,
    )


def prompt_rows(parts: Sequence[PrefillPart]) -> tuple[Rows, IntArray]:
    """Packed rows of prompt parts, and the packed row that ends each part [P]."""
    lengths = np.array([part.length for part in parts], np.int32)
    cu_lens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    past = np.array([part.start for part in parts], np.int32)
    ids = [token for part in parts for token in part.sequence.tokens[part.start : part.start + part.length]]
    positions = np.concatenate([np.arange(part.start, part.start + part.length) for part in parts])
    tables = tuple(part.sequence.block_table for part in parts)
    rows = Rows(np.array(ids, np.int32), positions.astype(np.int32), past, cu_lens, tables, prompt=True)
    return rows, cu_lens[1:] - 1


def lookups_of(parts: Sequence[PrefillPart], enabled: bool) -> PrefixLookups:
    """Of the prompts that begin with these parts; enabled: whether the prefix cache is asked at all."""
    begun = [part.sequence for part in parts if enabled and part.start == part.sequence.cached_tokens]
    return PrefixLookups(
        sum(sequence.prompt_length for sequence in begun), sum(sequence.cached_tokens for sequence in begun)
    )


def for_whole_batch(values: IntArray, rows: IntArray | None, batch: int) -> IntArray:
    """Values [b, ...] of the requests at `rows`, in an array [batch, ...] that is 0 elsewhere."""
    if rows is None:
        return values
    spread = np.zeros((batch, *values.shape[1:]), np.int32)
    spread[rows] = values
    return spread


def outcome_of(
    chosen: Chosen, commits: Sequence[Commit | None], draft_ms: float, verify_ms: float, step_ms: float
) -> StepOutcome:
    """commits: one per request of the batch, None where it failed."""
    keep = chosen.plan.keep
    accepted = np.array([0 if commit is None else commit.accepted for commit in commits], np.int32)
    # A request that ended within its accepted drafts never saw the target's own token after them.
    answered = [commit is not None and len(commit.tokens) > commit.accepted for commit in commits]
    return StepOutcome(
        view=chosen.view,
        intent=chosen.intent,
        draft=chosen.draft,
        selection=chosen.selection,
        keep=keep,
        accepted=accepted,
        judged=np.minimum(keep, accepted + np.array(answered, np.int32)),
        rows=chosen.plan.size,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        step_ms=step_ms,
    )
