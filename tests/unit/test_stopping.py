"""Stop strings: the earliest in the text, and the tail that must be held back."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from dcut_trt.stopping import find_stop, held_length

texts = st.text("ab ", max_size=12)
stops = st.lists(st.text("ab ", min_size=1, max_size=4), max_size=4)


@given(texts, stops, st.integers(0, 12))
def test_find_stop_equals_trying_every_index(text: str, stop: list[str], start: int) -> None:
    tried = [index for index in range(start, len(text)) if any(text.startswith(each, index) for each in stop)]
    found = find_stop(text, stop, start)
    assert (found and found[0]) == (tried[0] if tried else None)
    if found is not None:
        assert found[1] == next(each for each in stop if text.startswith(each, found[0]))


def test_the_earliest_in_the_text_wins_not_the_first_of_the_list() -> None:
    text = " The user is a"
    found = find_stop(text, ["a", "is", ","])
    assert found == (len(" The user "), "is")


@given(texts, stops)
def test_held_length_is_the_longest_tail_that_may_become_a_stop(text: str, stop: list[str]) -> None:
    assume(find_stop(text, stop) is None)
    tails = (text[index:] for index in range(len(text)))
    longest = next((tail for tail in tails if any(each.startswith(tail) for each in stop)), "")
    assert held_length(text, stop) == len(longest)


@given(st.lists(st.text("ab ", min_size=1, max_size=3), max_size=8), stops)
def test_what_is_shown_before_a_stop_is_never_part_of_it(pieces: list[str], stop: list[str]) -> None:
    text, shown = "", 0
    for piece in pieces:
        text += piece
        found = find_stop(text, stop, shown)
        if found is not None:
            assert found == find_stop(text, stop)
            return
        shown = len(text) - held_length(text, stop)
