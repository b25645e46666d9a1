"""What the steps of the last seconds add up to, and the last minute as a curve."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dcut_trt.metrics import StepRecord

WINDOW_S = 2.0
HISTORY_S = 60.0


@dataclass(frozen=True, slots=True)
class Tick:
    """The steps since the tick before. at: monotonic seconds."""

    at: float
    records: tuple[StepRecord, ...]


class Window:
    """The ticks of the last minute."""

    def __init__(self) -> None:
        self._ticks: deque[Tick] = deque()
        self._rates: deque[tuple[float, float, float | None]] = deque()  # at, tokens/s, ratio
        self.last_decode: StepRecord | None = None

    def add(self, now: float, records: Iterable[StepRecord], *, busy: bool) -> None:
        """busy: requests run. A ratio holds until the next decode step, which may be more than a tick away."""
        tick = Tick(now, tuple(records))
        for record in tick.records:
            if record.kind == "decode":
                self.last_decode = record
        ratio = self.last_decode.verified_share if busy and self.last_decode else None
        self._ticks.append(tick)
        while now - self._ticks[0].at > WINDOW_S:
            self._ticks.popleft()
        self._rates.append((now, self._tokens_per_s(), ratio))
        while now - self._rates[0][0] > HISTORY_S:
            self._rates.popleft()

    def to_json(self) -> dict[str, Any]:
        """Means over WINDOW_S; None where no step of the kind ran. Times in milliseconds per decode step."""
        records = [record for tick in self._ticks for record in tick.records if record.kind == "decode"]
        drafted = [record for record in records if record.draft_ms > 0 or record.ratio is not None]
        each = [accepted for record in drafted for accepted in record.accepted_each]
        possible = sum(record.possible - record.batch for record in drafted)
        stages = {name: _mean([getattr(record, name) for record in records]) for name in _STAGES}
        return {
            "tokens_per_s": round(self._tokens_per_s(), 1),
            "accepted_mean": _mean(each),
            "keep_share": round(sum(record.kept for record in drafted) / possible, 4) if possible else None,
            **stages,
        }

    def history(self, now: float) -> dict[str, list[float | None]]:
        """Oldest first. age: seconds before now."""
        return {
            "age": [round(now - at, 2) for at, _, _ in self._rates],
            "tokens_per_s": [round(rate, 1) for _, rate, _ in self._rates],
            "ratio": [ratio for _, _, ratio in self._rates],
        }

    def _tokens_per_s(self) -> float:
        """Over the window; the first tick's steps began before it, so only its end counts."""
        if len(self._ticks) < 2:
            return 0.0
        emitted = sum(record.emitted for tick in list(self._ticks)[1:] for record in tick.records)
        return emitted / (self._ticks[-1].at - self._ticks[0].at)


_STAGES = ("step_ms", "draft_ms", "select_ms", "verify_ms")


def _mean(values: list[float] | list[int]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None
