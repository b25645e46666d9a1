"""Stop strings: where a text must end, and how much of its tail may still become a stop string."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Index in text of the earliest stop string that lies at or after start, and that string; None without one.

    Of two that begin at one place the first in the list is named.
    """
    found = [(text.find(stop, start), stop) for stop in stops]
    return min((place for place in found if place[0] >= 0), key=lambda place: place[0], default=None)


def held_length(text: str, stops: Sequence[str], start: int = 0) -> int:
    """Length of the longest tail of text[start:] that is a proper prefix of a stop string: not to be shown yet."""
    longest = min(max((len(stop) for stop in stops), default=1) - 1, len(text) - start)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0
