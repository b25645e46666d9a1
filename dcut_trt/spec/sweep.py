"""Steps of synthetic requests: every batch size in turn, and the policies in turns at each."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from dcut_trt.admission import blocks_needed
from dcut_trt.engine import Engine
from dcut_trt.metrics import StepRecord
from dcut_trt.spec.packing import captured_batches
from dcut_trt.spec.policy import Policy
from dcut_trt.spec.rules import Plain
from dcut_trt.types import Request

logger = logging.getLogger(__name__)

PROMPT_LENGTH = 96  # a context of this length stands behind the measured steps

Progress = Callable[[int, int], None]


class Bypass(Plain):
    """Plain steps that keep the drafter's context fed, so that drafting steps can follow."""

    name = "bypass"
    drafts = True


@dataclass(frozen=True, slots=True)
class Turn:
    """A policy and how many steps in a row it runs. verifies: whether drafts, so that a step may add many tokens."""

    policy: Policy
    steps: int
    verifies: bool = True


@dataclass(slots=True)
class Series:
    """The steps of one turn at one batch size, over all rounds. A step whose K differs from the last one's costs more,
    so that the first of each round stands apart. contexts: mean rows of context per request behind `later`.
    """

    first: list[StepRecord] = field(default_factory=list)
    later: list[StepRecord] = field(default_factory=list)
    contexts: list[float] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        return median(record.step_ms for record in self.later)

    @property
    def rows(self) -> int:
        """K, the same at every step."""
        return self.first[0].rows

    @property
    def context(self) -> float:
        return fmean(self.contexts)


class Sweep:
    """Runs turns on an idle engine, which is idle after, with the policy that it had. A context manager."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._sharing = engine.scheduler.sharing
        self._served, self._cached = engine.policy, self._sharing.enabled
        self._bypass = Bypass()

    def __enter__(self) -> Sweep:
        self.engine.policy = self._bypass
        self._sharing.enabled = False  # or prompts, if equal, would not be computed
        return self

    def __exit__(self, *_: object) -> None:
        _empty(self.engine)
        self.engine.policy, self._sharing.enabled = self._served, self._cached
        self.engine.trace.reset()

    def run(self, batch: int, turns: Sequence[Turn], rounds: int, shape: tuple[int, int]) -> list[Series]:
        """One series per turn. shape: prompt and output tokens of a request."""
        engine = self.engine
        measured = [Series() for _ in turns]
        for turn, series in list(zip(turns, measured, strict=True)) * rounds:
            for step in range(turn.steps):
                engine.policy = self._bypass  # while a batch is filled nobody may run ahead and end
                _fill(engine, batch, *shape)
                engine.policy = turn.policy
                context = fmean(sequence.kv_len for sequence in engine.scheduler.running)
                engine.step()
                if step == 0:
                    series.first.append(engine.trace.records[-1])
                else:
                    series.later.append(engine.trace.records[-1])
                    series.contexts.append(context)
        _empty(engine)
        return measured


def request_shape(
    engine: Engine, batch: int, turns: Sequence[Turn], rounds: int, prompt_length: int = PROMPT_LENGTH
) -> tuple[int, int]:
    """Prompt and output tokens of a synthetic request; the output outlasts the turns where max_len allows.

    batch: requests to be filled in, at most.
    """
    limits = engine.limits
    tokens = rounds * sum(turn.steps * (limits.draft_length + 1 if turn.verifies else 1) for turn in turns)
    output = min(limits.max_len - 1, tokens + _chunks(engine, batch, prompt_length))
    return max(1, min(prompt_length, limits.max_len - output)), output


def most_that_fit(engine: Engine, shape: tuple[int, int]) -> int:
    """Requests of this shape that the cache can hold at once."""
    length, output = shape
    return engine.limits.num_blocks // blocks_needed(Request("profile", (0,) * length, output), engine.limits)


def batches_that_fit(engine: Engine, shape: tuple[int, int]) -> tuple[int, ...]:
    """The captured batch sizes that can be measured with requests of this shape; warns when some cannot."""
    limits, most = engine.limits, most_that_fit(engine, shape)
    captured = captured_batches(limits.max_batch)
    fit = tuple(batch for batch in captured if batch <= most and _chunks(engine, batch, shape[0]) < shape[1])
    if fit[-1] < limits.max_batch:
        logger.warning("cost table: at most %d synthetic requests fit; larger batches are not measured", fit[-1])
    return fit


def _fill(engine: Engine, batch: int, length: int, output: int) -> None:
    """Bring synthetic requests to decoding until `batch` of them are there."""
    while True:
        for _ in range(batch - len(engine.scheduler.live_ids())):
            ids = np.random.default_rng(engine.trace.totals.steps).integers(0, engine.limits.vocab_size, length)
            engine.submit(Request(f"profile-{secrets.token_hex(8)}", tuple(ids.tolist()), output, ignore_eos=True))
        running = engine.scheduler.running
        if len(running) == batch and all(sequence.output_length > 0 for sequence in running):
            return
        engine.step()


def _empty(engine: Engine) -> None:
    for request_id in engine.scheduler.live_ids():
        engine.cancel(request_id)
    engine.step()


def _chunks(engine: Engine, batch: int, length: int) -> int:
    """Prefill steps of a batch; between any two of them, whoever is complete already decodes once."""
    return -(-batch * length // engine.scheduler.busy_prefill_chunk)
