"""The acceptance rule: what the target itself would have said decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def accept(drafts: Sequence[int], target_token: Callable[[int], int]) -> list[int]:
    """Longest prefix of drafts equal to the target's own tokens, plus the target's next token.

    drafts: the n verified drafts of one request.
    target_token: depth 0..n -> the token that the target chooses (argmax or sampled) after the row at that depth;
        called only up to the first mismatch, so that no sample is drawn that is not emitted.
    Returns 1 to n + 1 tokens. Exact at any temperature, since every emitted token is the target's own.
    """
    emitted: list[int] = []
    for depth in range(len(drafts) + 1):
        token = target_token(depth)
        emitted.append(token)
        if depth == len(drafts) or token != drafts[depth]:
            break
    return emitted
