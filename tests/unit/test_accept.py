"""The acceptance rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dcut_trt.spec.accept import accept

tokens = st.integers(0, 2)  # few, so that long matches happen


@given(st.lists(tokens, max_size=8), st.lists(tokens, min_size=9, max_size=9))
def test_the_longest_matching_prefix_and_the_targets_next_token(drafts: list[int], own: list[int]) -> None:
    matching = 0
    while matching < len(drafts) and drafts[matching] == own[matching]:
        matching += 1
    assert accept(drafts, own.__getitem__) == own[: matching + 1]


@given(st.lists(tokens, max_size=8), st.lists(tokens, min_size=9, max_size=9))
def test_the_target_is_asked_once_per_emitted_token_in_order(drafts: list[int], own: list[int]) -> None:
    asked: list[int] = []

    def target_token(depth: int) -> int:
        asked.append(depth)
        return own[depth]

    emitted = accept(drafts, target_token)
    assert asked == list(range(len(emitted)))


def test_without_drafts_the_target_speaks_alone() -> None:
    assert accept([], lambda depth: 7) == [7]


def test_all_accepted_gives_the_bonus_token() -> None:
    assert accept([1, 2, 3], [1, 2, 3, 4].__getitem__) == [1, 2, 3, 4]
