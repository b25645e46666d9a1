"""The default rule: expected tokens against expected time, over every budget, depth, and not drafting at all."""

from __future__ import annotations

import dataclasses
import functools
import logging
from dataclasses import dataclass

import numpy as np

from dcut_trt.spec.arm_costs import ArmTimes, FeedCost
from dcut_trt.spec.arms import BYPASS, PROBE, Arms
from dcut_trt.spec.cost_model import CostModel
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.load import Load
from dcut_trt.spec.packing import block_depths, budget
from dcut_trt.spec.policy import NO_DRAFT, WHOLE_BLOCK, Policy
from dcut_trt.spec.replay import RecentBlocks, prospect
from dcut_trt.spec.rules import FixedDepth
from dcut_trt.spec.score import AcceptanceScore
from dcut_trt.spec.selector import keep_depths, prefix_log_scores, rank
from dcut_trt.stage_types import BatchView, Draft, DraftTraits, Intent, Offer, Selection, StepOutcome
from dcut_trt.types import FloatArray, IntArray

logger = logging.getLogger(__name__)

_KNOWN = 32  # recent blocks before the arms are compared
_PROBE_ROWS = 4  # requests that draft in a probe
_TAUGHT = 256  # steps of greedy requests, or of sampled ones, after which few teach much
_THINNED = 4  # then one step in so many is learnt from, as when nobody drafts: all would cost 0.5 % of the time
_HABIT = 16  # steps in a row with the K that is best on the average, after which a single request's is not looked for
_LATEST = 32  # blocks that count while only probes bring new ones
_LATEST_DRAFTED, _LATEST_STEPS = 96, 8  # blocks that count else, or steps that do: older ones saw another load
_STAY = 64  # steps over which the features that wait for the drafter are paid off


@dataclass(frozen=True, slots=True)
class AutoParts:
    """What of the rule is in use, so that each part's gain can be measured by leaving it out.

    score: fitted acceptance, else the prefix product.  budget: any number of rows, else the table's ratios.
    cost: costs by context, block depth and change of K, with what steps took deciding between the arms, else by
    batch size and K alone.  bypass: steps without drafting.  depth: short blocks.
    """

    score: bool = True
    budget: bool = True
    cost: bool = True
    bypass: bool = True
    depth: bool = True

    @classmethod
    def without(cls, text: str) -> AutoParts:
        """From a text that names_parts() accepts, such as "-score-budget"; "" leaves nothing out."""
        return cls(**dict.fromkeys(text.split("-")[1:], False))


PART_NAMES = tuple(field.name for field in dataclasses.fields(AutoParts))


def names_parts(text: str) -> bool:
    """Whether a text names parts to leave out, each once and after a minus."""
    before, *names = text.split("-")
    return not before and len(set(names)) == len(names) and set(names) <= set(PART_NAMES)


def make_auto(text: str, table: CostTable | None, traits: DraftTraits) -> Policy:
    """`auto`, or `auto:` and the parts to leave out; verifies every draft when there is no cost table."""
    name = f"auto:{text}" if text else "auto"
    if table is None:
        logger.warning("policy=%r: there is no cost table, so every draft is verified", name)
        fixed = FixedDepth()
        fixed.name = name
        return fixed
    parts = AutoParts.without(text)
    known = table if parts.cost else table.bare
    return Auto(parts, traits, CostModel(known, traits.draft_length), AcceptanceScore(traits.draft_length), name)


class Auto:
    """Draft for all, for a few or for nobody, as deep as pays; then verify the drafts that pay.

    Before drafting, recent blocks tell what each arm would bring (replay.py); after it, the drafts' own scores do.
    """

    drafts = True
    learns = True

    def __init__(
        self,
        parts: AutoParts,
        traits: DraftTraits,
        costs: CostModel,
        score: AcceptanceScore,
        name: str = "auto",
    ) -> None:
        self.name = name
        self.parts = parts
        self._table = costs.table
        self._length = traits.draft_length
        self._any_budget = traits.any_budget
        self._ratios = None if traits.any_budget and parts.budget else costs.table.ratios  # None: K may be any number
        self._depths: tuple[int, ...] = (self._length,)
        if parts.depth and traits.short_blocks:
            self._depths = block_depths(self._length)
        self._costs, self._score = costs, score
        self._recent = RecentBlocks(self._length)
        self._arms, self._times, self._feed = Arms(self._length), ArmTimes(), FeedCost()
        self._home: dict[tuple[int, int], int] = {}  # batch, depth -> the K to come back to
        self._measured: tuple[float, float] | None = None  # tokens and rows per request, where a device selects
        self._taught = {False: 0, True: 0}  # lessons, by whether most of the batch was sampled
        self._last_rows = self._steps = self._at_home = 0
        self._context = np.nan  # as profiled
        self._load, self._sampled = Load(0), 0  # what runs now, and how many of the requests are sampled
        self._intent = WHOLE_BLOCK
        self._may_bypass = parts.bypass and np.isfinite(costs.plain_ms(1, np.nan))

    def intend(self, view: BatchView) -> Intent:
        self._steps += 1
        self._context = float(view.context_lens.sum()) / view.batch
        self._sampled = int(np.count_nonzero(view.temperatures))
        self._load = Load(view.batch, 2 * self._sampled > view.batch)
        self._intent = self._choose(view)
        return self._intent

    def _choose(self, view: BatchView) -> Intent:
        load, batch = self._load, view.batch
        if view.filling and self._may_bypass:
            full = load._replace(batch=batch + view.filling)
            if self._arms.current(full) == BYPASS:
                return NO_DRAFT  # the larger batch makes more of the time that a longer step would keep it waiting
        if self._recent.known(sampled=load.sampled) < _KNOWN and self._measured is None:
            sparing = self._may_bypass and self._any_budget and batch > _PROBE_ROWS
            return self._few(view) if sparing else WHOLE_BLOCK
        if self._arms.must_compare(load):
            self._compare(view)
        arm = self._arms.next(load)
        if arm == PROBE:
            return self._few(view) if self._any_budget else WHOLE_BLOCK
        if arm == self._length:
            return WHOLE_BLOCK
        return NO_DRAFT if arm == BYPASS else Intent(depth=arm)

    def _few(self, view: BatchView) -> Intent:
        """Those draft for whom the drafter has the least to catch up with."""
        count = min(_PROBE_ROWS, view.batch)
        rows = np.sort(np.argpartition(view.pending_rows, count - 1)[:count]).astype(np.int32)
        return Intent(rows=rows)

    def _compare(self, view: BatchView) -> None:
        batch = view.batch
        bypassing = self._arms.current(self._load) == BYPASS
        resume_ms = self._feed(int(view.pending_rows.sum())) / _STAY if bypassing else 0.0
        if self._measured is None:
            latest = _LATEST if bypassing else max(_LATEST_DRAFTED, _LATEST_STEPS * batch)
            batches = self._recent.batches(batch, self._sampled, latest)
            rates = {depth: self._draft_rate(batches, depth, resume_ms) for depth in self._depths}
        else:
            rates = {self._length: self._measured_rate(self._measured, resume_ms)}
        prompts_ms = self._feed.prompts_ms()
        rates = {depth: 1 / (1 / rate + prompts_ms) for depth, rate in rates.items()}
        if self._may_bypass:
            rates[BYPASS] = batch / self._plain_ms()
        self._arms.compare(self._load, rates)

    def _plain_ms(self) -> float:
        return self._costs.plain_ms(self._load.batch, self._context) * self._times.plain_factor(self._load)

    def _draft_rate(self, batches: FloatArray, depth: int, resume_ms: float) -> float:
        """Tokens per millisecond that drafting `depth` tokens for all is expected to bring, prompts left out."""
        batch = batches.shape[1]
        sizes = self._sizes(batch, batch, depth)
        cost_ms = self._costs.step_ms(batch, sizes, depth, self._context) + resume_ms
        found = prospect(batches, depth, sizes, cost_ms, self._costs.switch_ms)
        self._home[batch, depth] = found.size
        return found.rate

    def _measured_rate(self, measured: tuple[float, float], resume_ms: float) -> float:
        batch = self._load.batch
        tokens, rows = measured
        size = np.array([round(rows * batch)], np.int32)
        cost_ms = self._costs.step_ms(batch, size, self._length, self._context)
        return float(tokens * batch / (cost_ms[0] + resume_ms))

    def _sizes(self, batch: int, drafting: int, depth: int) -> IntArray:
        """The K that may be verified when `drafting` of the batch have drafted `depth` tokens."""
        if self._table.flat:
            return np.array([batch + drafting * depth], np.int32)
        return _sizes(batch, drafting, depth, self._ratios)

    def select(self, draft: Draft, view: BatchView) -> Selection:
        drafting, depth = draft.confidence.shape
        batch, rows = view.batch, self._intent.rows
        home = self._home.get((batch, depth), self._last_rows)
        if batch == 1 and self._at_home >= _HABIT and not self._is_lesson():
            return Selection(np.array([home - 1], np.int32), self._ratio_of(home, batch))
        scored = self._score.log_scores(draft, view, rows) if self.parts.score else prefix_log_scores(draft.confidence)
        ranked = rank(scored)
        sizes = self._sizes(batch, drafting, depth)
        others = batch - drafting  # anchors of those that did not draft
        if rows is not None:
            sizes = sizes[sizes >= others + 2 * drafting]  # a probe that verifies nothing would tell nothing
        expected = others + np.cumsum(np.exp(scored.T.ravel()[ranked]), dtype=np.float64)[sizes - others - 1]
        cost_ms = self._costs.step_ms(batch, sizes, depth, self._context)
        if switch_ms := self._costs.switch_ms:
            # Once for leaving the last step's K, and once for the way back to the one that is best on the average.
            cost_ms += switch_ms * (1.0 * (sizes != self._last_rows) + (sizes != home))
        size = int(sizes[np.argmax(expected / cost_ms)])
        self._at_home = self._at_home + 1 if batch == 1 and size == home else 0
        return Selection(keep_depths(ranked, size - others, drafting), self._ratio_of(size, batch), scored)

    def _ratio_of(self, size: int, batch: int) -> float | None:
        ratios = self._ratios
        if ratios is None:
            return None
        return next((ratio for ratio in ratios if budget(ratio, batch, self._length + 1) >= size), ratios[-1])

    def offer(self, batch: int) -> Offer:
        ratios = self._table.ratios
        if self._table.flat:
            return Offer(ratios, np.ones(len(ratios)))
        sizes = np.array([budget(ratio, batch, self._length + 1) for ratio in ratios], np.int32)
        return Offer(ratios, self._costs.step_ms(batch, sizes, self._length, self._context))

    def observe(self, outcome: StepOutcome) -> None:
        drafted = outcome.intent.depth != 0
        if self._tells_times(outcome, drafted=drafted):
            self._times.learn(self._load, outcome.step_ms, self._predicted_ms(outcome), drafting=drafted)
            if self._times.shifted(self._load):
                self._arms.doubt(self._load)
        self._last_rows = outcome.rows
        self._feed.meet(outcome.view, outcome.view.batch + int(outcome.accepted.sum()))
        if drafted:
            self._learn_blocks(outcome)
        self._arms.passed(self._load, outcome.step_ms, self._plain_ms() if drafted else 0.0, drafted=drafted)

    def _tells_times(self, outcome: StepOutcome, *, drafted: bool) -> bool:
        """Whether the arms' costs are learnt from this step: it is no probe, and its prompts did not disturb it."""
        if not self.parts.cost or not self._may_bypass or outcome.intent.rows is not None or outcome.view.after_prompt:
            return False
        if drafted or self._arms.current(self._load) != BYPASS:
            return True
        return self._steps % _THINNED == 0 and outcome.rows == self._last_rows

    def _predicted_ms(self, outcome: StepOutcome) -> float:
        # Nothing corrects it: a factor that all K share changes no choice among them, and ArmTimes sees to the arms.
        batch, depth = outcome.view.batch, outcome.intent.depth
        if depth == 0:
            return self._costs.plain_ms(batch, self._context)
        size = np.array([outcome.rows], np.int32)
        switch_ms = self._costs.switch_ms * (outcome.rows != self._last_rows)
        return float(self._costs.step_ms(batch, size, depth or self._length, self._context)[0]) + switch_ms

    def _learn_blocks(self, outcome: StepOutcome) -> None:
        view, intent = outcome.view, outcome.intent
        if outcome.selection is None:
            seen = np.array([1 + outcome.accepted.mean(), outcome.rows / view.batch])
            before = seen if self._measured is None else np.array(self._measured)
            self._measured = tuple((before + (seen - before) / 16).tolist())
            return
        drafting = slice(None) if intent.rows is None else intent.rows
        if outcome.selection.log_scores is not None:
            self._recent.add(outcome.selection.log_scores, view.temperatures[drafting])
        pending = view.pending_rows[drafting]
        depth = self._length if intent.depth is None else intent.depth
        self._feed.learn(len(pending) * (depth + 1), int(pending.sum()), outcome.draft_ms)
        if self._is_lesson():
            self._taught[self._load.sampled] += 1
            if self.parts.score:
                self._score.learn(outcome)

    def _is_lesson(self) -> bool:
        """Whether this step's drafts are learnt from."""
        return self._taught[self._load.sampled] <= _TAUGHT or self._steps % _THINNED == 0


@functools.lru_cache(maxsize=1024)
def _sizes(batch: int, drafting: int, depth: int, ratios: tuple[float, ...] | None) -> IntArray:
    most = batch + drafting * depth
    if ratios is None:
        return np.arange(batch, most + 1, dtype=np.int32)
    others = batch - drafting
    return np.array(sorted({others + budget(ratio, drafting, depth + 1) for ratio in ratios}), np.int32)
