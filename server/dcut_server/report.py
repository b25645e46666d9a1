"""What a person reads after an answer: how fast it was, and what drafting and pruning did for it."""

from __future__ import annotations

from collections.abc import Sequence

from dcut_trt.types import FinishReason, TokenLogprob, Usage


def usage_line(usage: Usage, finish: FinishReason, seconds: float) -> str:
    """One line, such as: 48 tokens in 14 steps (3.4 per step), 0.41 s, 117.1 tokens/s, stop; drafts: ..."""
    per_step = usage.output_tokens / usage.steps if usage.steps else 0.0
    rate = usage.output_tokens / seconds if seconds > 0 else 0.0
    return (
        f"{usage.output_tokens} tokens in {usage.steps} steps ({per_step:.1f} per step), {seconds:.2f} s, "
        f"{rate:.1f} tokens/s, {finish.value}; drafts: {usage.drafted} proposed, "
        f"{usage.drafted - usage.verified} pruned, {usage.verified} verified, {usage.accepted} accepted"
    )


def logprob_lines(logprobs: Sequence[TokenLogprob]) -> list[str]:
    """One line per emitted token, such as: 4711 -0.1234 | 4711 -0.1234, 12 -3.4567"""
    return [
        f"{entry.token_id} {entry.logprob:.4f} | " + ", ".join(f"{token} {value:.4f}" for token, value in entry.top)
        for entry in logprobs
    ]
