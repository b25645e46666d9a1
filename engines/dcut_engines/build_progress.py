"""How far a build has come, from TensorRT's nested phases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

# Takes the done fraction of a stage, 0 to 1.
Report = Callable[[float], None]


@dataclass(slots=True)
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class Phases:
    """Phases have steps, and a phase may run inside a step of another; called from any of TensorRT's threads."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._phases: dict[str, _Phase] = {}
        self._lock = threading.Lock()
        self._shown = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        with self._lock:
            self._phases[name] = _Phase(parent if parent in self._phases else None, max(steps, 1))

    def step(self, name: str, index: int) -> None:
        """Step `index` of the phase, from 0, is complete."""
        with self._lock:
            if name in self._phases:
                self._phases[name].done = max(self._phases[name].done, index + 1)
                self._show()

    def finish(self, name: str) -> None:
        with self._lock:
            self._phases.pop(name, None)
            self._show()

    def _show(self) -> None:
        roots = [name for name, phase in self._phases.items() if phase.parent is None]
        if not roots:
            return
        # A phase that ends before its parent's step does would pull the bar back.
        fraction = max(self._fraction(name) for name in roots)
        if fraction > self._shown:
            self._shown = fraction
            self._report(fraction)

    def _fraction(self, name: str) -> float:
        phase = self._phases[name]
        inner = [self._fraction(child) for child, other in self._phases.items() if other.parent == name]
        return min((phase.done + max(inner, default=0.0)) / phase.steps, 1.0)
