"""What each step did and how long its stages took, and running totals of it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from dcut_trt.types import Commit

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
StepKind = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class PrefixLookups:
    """Of the prompts that began in a step. queried: their tokens.  hits: those of them that the prefix cache held."""

    queried: int = 0
    hits: int = 0


_NO_LOOKUPS = PrefixLookups()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. rows: K computed by the target.  possible: B * (D + 1), or the rows of a prefill.

    kept, accepted: draft tokens.  emitted: output tokens.  Times in milliseconds: draft_ms, select_ms (score, select,
    pack) and verify_ms are stages; network_ms is what the runtime's own calls took, the rest of the step is host time.
    accepted_each: of a decode step, the accepted drafts of each request. One that ended within its accepted drafts is
    left out: how many more would have been accepted is not known.
    """

    kind: StepKind
    batch: int
    rows: int
    possible: int
    kept: int
    accepted: int
    emitted: int
    ratio: float | None
    draft_ms: float
    select_ms: float
    verify_ms: float
    network_ms: float
    step_ms: float
    accepted_each: tuple[int, ...] = ()
    lookups: PrefixLookups = _NO_LOOKUPS

    @property
    def host_ms(self) -> float:
        return self.step_ms - self.network_ms

    @property
    def verified_share(self) -> float | None:
        """The chosen ratio, or what a rule without ratios came to; None where no draft was verified."""
        if self.ratio is None and self.kept:
            return self.rows / self.possible
        return self.ratio


@dataclass(slots=True)
class Totals:
    """Sums over all steps since the engine started. drafted = pruned + verified.

    prompt_tokens: prompt rows that were computed.  cached_prompt_tokens: those that the prefix cache held instead.
    """

    steps: int = 0
    requests_finished: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    cached_prompt_tokens: int = 0


@dataclass(slots=True)
class StepTrace:
    """Stage clocks wrapped around the engine's stages, and the records of its latest steps.

    network_ms: milliseconds that both networks have taken since the start.
    listeners: called after every step, in the engine's thread, with its record and commits; must be quick. One that
        raises is logged and not called again: whoever watches must not end the streams.
    """

    network_ms: Callable[[], float]
    clock: Callable[[], float] = time.perf_counter
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=4096))
    totals: Totals = field(default_factory=Totals)
    listeners: list[Callable[[StepRecord, Sequence[Commit]], None]] = field(default_factory=list)
    _stage_ms: dict[str, float] = field(default_factory=dict)
    _started: float = 0.0
    _network_before: float = 0.0

    def reset(self) -> None:
        """Forget everything measured so far, as after warm-up."""
        self.records.clear()
        self.totals = Totals()

    def start(self) -> None:
        """Begin a step."""
        self._stage_ms.clear()
        self._network_before = self.network_ms()
        self._started = self.clock()

    @contextmanager
    def stage(self, name: Literal["draft", "select", "verify"]) -> Iterator[None]:
        """Add the time spent inside to a stage of the current step."""
        begun = self.clock()
        try:
            yield
        finally:
            self._stage_ms[name] = self._stage_ms.get(name, 0.0) + (self.clock() - begun) * 1e3

    def so_far_ms(self, name: Literal["draft", "select", "verify"] | None) -> float:
        """What a stage of the current step has taken, or the step itself."""
        return (self.clock() - self._started) * 1e3 if name is None else self._stage_ms.get(name, 0.0)

    def finish(
        self,
        kind: StepKind,
        commits: list[Commit],
        batch: int,
        rows: int,
        possible: int,
        ratio: float | None,
        lookups: PrefixLookups = _NO_LOOKUPS,
    ) -> None:
        """Close the current step; every count derives from its commits."""
        record = StepRecord(
            kind=kind,
            batch=batch,
            rows=rows,
            possible=possible,
            kept=sum(commit.verified for commit in commits),
            accepted=sum(commit.accepted for commit in commits),
            emitted=sum(len(commit.tokens) for commit in commits),
            ratio=ratio,
            draft_ms=self._stage_ms.get("draft", 0.0),
            select_ms=self._stage_ms.get("select", 0.0),
            verify_ms=self._stage_ms.get("verify", 0.0),
            network_ms=self.network_ms() - self._network_before,
            step_ms=(self.clock() - self._started) * 1e3,
            accepted_each=_accepted_each(commits) if kind == "decode" else (),
            lookups=lookups,
        )
        self.records.append(record)
        self.totals.steps += 1
        self.totals.prompt_tokens += rows if kind == "prefill" else 0
        self.totals.cached_prompt_tokens += lookups.hits
        self.totals.output_tokens += record.emitted
        self.totals.drafted += sum(commit.drafted for commit in commits)
        self.totals.verified += record.kept
        self.totals.accepted += record.accepted
        self.totals.requests_finished += sum(commit.finish is not None for commit in commits)
        for listener in tuple(self.listeners):
            try:
                listener(record, commits)
            except Exception:
                logger.exception("a listener of the step trace failed; it hears of no further steps")
                self.listeners.remove(listener)


def _accepted_each(commits: list[Commit]) -> tuple[int, ...]:
    """Of all commits that hold the target's own token, which follows the accepted drafts."""
    return tuple(commit.accepted for commit in commits if len(commit.tokens) > commit.accepted)
