"""A machine that is a cost model, serving texts whose drafts and their fate are known beforehand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dcut_server.simulate.oracles import Seer
from dcut_server.simulate.traces import Trace
from dcut_trt.errors import DcutError
from dcut_trt.spec.cost_model import CostModel
from dcut_trt.spec.packing import budget
from dcut_trt.spec.policy import Policy
from dcut_trt.stage_types import BatchView, Draft, DraftTraits, Selection, StepOutcome
from dcut_trt.types import IntArray

MOST_PENDING = 512  # feature rows; steps without drafts feed the drafter before there are more


class SimulationError(DcutError):
    """What was asked for cannot be simulated, or a policy broke its contract. The message says where."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What some steps came to. tokens: emitted.  rows: K, summed.  blocks: drafted.  batch: live requests."""

    batch: int
    steps: int = 0
    tokens: int = 0
    rows: int = 0
    blocks: int = 0
    ms: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.tokens / self.ms

    @property
    def tokens_per_step(self) -> float:
        """Per request: accepted drafts and the target's own token."""
        return self.tokens / (self.steps * self.batch)

    @property
    def tokens_per_row(self) -> float:
        return self.tokens / self.rows


class World:
    """B live requests, each at a place in its text; one that ends is followed by the next of the trace, from its start.

    Positions pruned or not do not change a text, so a step that emits m tokens moves a request by m positions.

    paired: requests move as if every draft were verified, whatever the policy keeps. All policies then meet the same
    blocks in the same steps, and their ratios hardly depend on the seed. It is fair where a block does not depend on
    where the last one ended: with generated drafts.
    """

    def __init__(
        self, trace: Trace, model: CostModel, batch: int, traits: DraftTraits, *, seed: int = 0, paired: bool = False
    ) -> None:
        self.trace = trace
        self.model = model
        self.batch = batch
        self.traits = traits
        self.paired = paired
        generator = np.random.default_rng(seed)
        self._request = np.arange(batch) % trace.requests  # [B] which text
        self._next = batch
        lengths = np.diff(trace.starts)[self._request]
        # Texts under way, as in a server that has run for a while; all beginning together would end together.
        self.places = trace.starts[self._request] + (generator.random(batch) * lengths).astype(np.int64)  # [B]
        self.pending = trace.prompt_lens[self._request].astype(np.int32)
        self._ids = [f"{slot}" for slot in range(batch)]
        self._last_rows = 0
        self.totals = Totals(batch)

    @property
    def passes(self) -> float:
        """How often each text of the trace has been begun."""
        return self._next / self.trace.requests

    def run(self, policy: Policy, steps: int) -> Totals:
        """Totals of so many further steps."""
        before = self.totals
        for _ in range(steps):
            self.step(policy)
        after = self.totals
        counts = ("steps", "tokens", "rows", "blocks", "ms")
        return Totals(self.batch, **{name: getattr(after, name) - getattr(before, name) for name in counts})

    def step(self, policy: Policy) -> StepOutcome:
        """One step of all requests, as the engine makes it."""
        view = self._view()
        intent = policy.intend(view)
        depth = self.traits.draft_length if intent.depth is None else intent.depth
        rows = np.arange(self.batch, dtype=np.int32) if intent.rows is None else intent.rows
        if depth == 0:
            rows = rows[:0]
        draft, selection = self._drafted(policy, view, rows, depth)
        keep = np.zeros(self.batch, np.int32)
        if selection is not None:
            keep[rows] = selection.keep
        draft_ms, step_ms = self._cost(view, len(rows), depth, keep)
        outcome = StepOutcome(
            view=view,
            intent=intent,
            draft=draft,
            selection=selection,
            keep=keep,
            accepted=np.minimum(self.trace.accepted[self.places], keep),
            judged=np.minimum(self.trace.judged[self.places], keep),
            rows=int(keep.sum()) + self.batch,
            draft_ms=draft_ms,
            verify_ms=step_ms - draft_ms,
            step_ms=step_ms,
        )
        self._advance(outcome, rows)
        if policy.learns:
            policy.observe(outcome)
        return outcome

    def _view(self) -> BatchView:
        trace = self.trace
        committed = self.places - trace.starts[self._request]
        contexts = (trace.prompt_lens[self._request] + committed).astype(np.int32)
        words = None if trace.last_tokens is None else trace.last_tokens[self.places]
        return BatchView(tuple(self._ids), contexts, self.pending.copy(), trace.temperatures[self._request], words)

    def _drafted(
        self, policy: Policy, view: BatchView, rows: IntArray, depth: int
    ) -> tuple[Draft | None, Selection | None]:
        if not len(rows):
            return None, None
        if depth < self.traits.draft_length and not self.traits.short_blocks:
            raise SimulationError(f"policy={policy.name!r}: drafts {depth} tokens where blocks are whole")
        places, trace = self.places[rows], self.trace
        margin = None if trace.margin is None else trace.margin[places, :depth]
        confidence = trace.confidence[places, :depth]
        tokens = np.zeros(confidence.shape, np.int32) if trace.tokens is None else trace.tokens[places, :depth]
        draft = Draft(tokens, confidence, margin=margin)
        if isinstance(policy, Seer):
            policy.foresee(trace.accepted[places])
        selection = policy.select(draft, view)
        if selection.keep.shape != rows.shape or selection.keep.min() < 0 or selection.keep.max() > depth:
            raise SimulationError(f"policy={policy.name!r}: keep {selection.keep.tolist()}: must be 0 to {depth} each")
        return draft, selection

    def _cost(self, view: BatchView, drafting: int, depth: int, keep: IntArray) -> tuple[float, float]:
        """Milliseconds of drafting, and of the step."""
        context = float(view.context_lens.mean())
        size = int(keep.sum()) + self.batch
        if not drafting:
            step_ms = self.model.plain_ms(self.batch, context)
            if not math.isfinite(step_ms):
                raise SimulationError("plain_ms: this cost table does not say what a step without drafting costs")
            return 0.0, self._switched(size, step_ms)
        if not self.traits.any_budget:
            size = self._bucket(size)
        step_ms = float(self.model.step_ms(self.batch, np.array([size]), depth, context)[0])
        draft_ms = self.draft_ms(self.batch, depth)
        if drafting < self.batch:
            fewer_ms = self.draft_ms(drafting, depth)
            draft_ms, step_ms = fewer_ms, step_ms - draft_ms + fewer_ms
        return draft_ms, self._switched(size, step_ms)

    def draft_ms(self, batch: int, depth: int) -> float:
        """The drafter's pass for so many requests, as profiled; 0 where it was not."""
        table = self.model.table
        if table.draft_ms is None or table.depths is None:
            return 0.0
        by_depth = [np.interp(batch, table.batches, column) for column in table.draft_ms.T]
        return float(np.interp(depth, table.depths, by_depth))

    def _bucket(self, size: int) -> int:
        """The rows that a target of fixed shapes computes for K = size."""
        block = self.traits.draft_length + 1
        budgets = [budget(ratio, self.batch, block) for ratio in self.model.table.ratios]
        return min((rows for rows in budgets if rows >= size), default=size)

    def _switched(self, size: int, step_ms: float) -> float:
        switched = size != self._last_rows and self._last_rows > 0
        self._last_rows = size
        return step_ms + (self.model.switch_ms if switched else 0.0)

    def _advance(self, outcome: StepOutcome, rows: IntArray) -> None:
        ends = self.trace.starts[self._request + 1]
        # The last draft of a text may be accepted, and then there is no token of the target's own to follow it.
        emitted = np.minimum(outcome.accepted + 1, ends - self.places)
        moved = np.minimum(self.trace.accepted[self.places] + 1, ends - self.places) if self.paired else emitted
        self.places = self.places + moved
        self.pending[rows] = 0
        self.pending = np.minimum(self.pending + moved, MOST_PENDING).astype(np.int32)
        before = self.totals
        self.totals = Totals(
            batch=self.batch,
            steps=before.steps + 1,
            tokens=before.tokens + int(emitted.sum()),
            rows=before.rows + outcome.rows,
            blocks=before.blocks + len(rows),
            ms=before.ms + outcome.step_ms,
        )
        for slot in np.flatnonzero(self.places >= ends):
            request = self._next % self.trace.requests
            self._request[slot], self.places[slot] = request, self.trace.starts[request]
            self.pending[slot] = self.trace.prompt_lens[request]
            self._ids[slot] = f"{self._next}"
            self._next += 1
