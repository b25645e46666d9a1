"""The last step of both networks: from logits to tokens, and to what drafts are ranked by."""

from __future__ import annotations

from dcut_engines.networks.ops import Ops, T


def greedy_choice(ops: Ops[T], logits: T) -> T:
    """The most likely token of each row: logits [H, V] -> i32 [H]."""
    token, _ = ops.argmax(logits)
    return token


def draft_choice(ops: Ops[T], logits: T, draft_vocab: T | None) -> tuple[T, T, T | None]:
    """The most likely token of each row, its probability and its margin: logits [R, V'] -> i32, f32, f32 [R].

    draft_vocab: i32 [V'] target token id of each logit; None when the draft vocabulary is the target's.
    """
    choice, peak = ops.argmax(logits)
    confidence = ops.peak_probability(logits, peak)
    token = choice if draft_vocab is None else ops.gather(draft_vocab, choice)
    return token, confidence, ops.margin(logits, peak, confidence)
