"""What became of the drafts of every live request, step by step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from dcut_trt.types import Commit

MAX_STRIPS = 32
STEPS_SHOWN = 96
LINGER_S = 2.0
"""How long an ended request stays in its place, unless a new one needs it."""

NOT_DRAFTED = -1


@dataclass(slots=True)
class Strip:
    """One request's latest steps: accepted[i] <= kept[i] <= D drafts; kept[i] is NOT_DRAFTED for a step without.

    tokens: output tokens seen.  whole: they were seen from the request's first one on.
    """

    request_id: str
    whole: bool
    tokens: int = 0
    ended_at: float | None = None
    accepted: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_SHOWN))
    kept: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_SHOWN))

    def add(self, commit: Commit, now: float) -> None:
        self.tokens += len(commit.tokens)
        if commit.drafted:
            self.accepted.append(commit.accepted)
            self.kept.append(commit.verified)
        elif self.tokens > len(commit.tokens) or not self.whole:  # the prompt's own step is none of these
            self.accepted.append(0)
            self.kept.append(NOT_DRAFTED)
        if commit.finish is not None:
            self.ended_at = now


class Strips:
    """Up to MAX_STRIPS requests, each in a place that it keeps, so that no row jumps on the page."""

    def __init__(self) -> None:
        self._places: list[Strip | None] = [None] * MAX_STRIPS
        self._live: dict[str, Strip] = {}

    def add(self, commit: Commit, now: float, *, first: bool) -> None:
        """first: the commit holds the request's first output token. Without a free place it is not shown."""
        strip = self._live.get(commit.request_id) or self._place(Strip(commit.request_id, whole=first))
        if strip is not None:
            strip.add(commit, now)
            if strip.ended_at is not None:
                del self._live[commit.request_id]

    def settle(self, live_ids: Container[str], now: float) -> None:
        """Mark those that left without a commit (cancelled, expired, failed), and clear places that ended long ago."""
        for request_id in [request_id for request_id in self._live if request_id not in live_ids]:
            self._live.pop(request_id).ended_at = now
        for place, strip in enumerate(self._places):
            if strip is not None and strip.ended_at is not None and now - strip.ended_at > LINGER_S:
                self._places[place] = None

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "place": place,
                "id": strip.request_id,
                "live": strip.ended_at is None,
                "tokens": strip.tokens,
                "whole": strip.whole,
                "accepted": list(strip.accepted),
                "kept": list(strip.kept),
            }
            for place, strip in enumerate(self._places)
            if strip is not None
        ]

    def _place(self, strip: Strip) -> Strip | None:
        """Into the place of the longest ended, or a free one: so a busy page does not grow and shrink."""
        ages = [math.inf if held is None else held.ended_at for held in self._places]
        free = [(age, place) for place, age in enumerate(ages) if age is not None]
        if not free:
            return None
        self._places[min(free)[1]] = self._live[strip.request_id] = strip
        return strip
