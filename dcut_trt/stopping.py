"""Stop strings: where a text must end, and how much of its tail may still become a stop string."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Index in text of the earliest stop string at or after start, whichever stop that is; None without one."""
    found = [index for index in (text.find(stop, start) for stop in stops) if index >= 0]
    return min(found, default=None)


def held_length(text: str, stops: Sequence[str]) -> int:
    """Length of the longest tail of text that is a proper prefix of a stop string, and so must not be shown yet."""
    longest = min(max((len(stop) for stop in stops), default=1) - 1, len(text))
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0
