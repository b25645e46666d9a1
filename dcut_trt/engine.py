"""The step: schedule, draft, select, verify, accept, commit."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np

from dcut_trt.admission import check_request
from dcut_trt.backends.base import Drafter, Target
from dcut_trt.choice import SequenceChoice, TargetChoice
from dcut_trt.errors import DcutError, StepFailed, UnsupportedOption
from dcut_trt.events import commit_event, fault_event, leave_events
from dcut_trt.metrics import StepTrace
from dcut_trt.scheduler import PrefillPart, Scheduler
from dcut_trt.sequence import Sequence as LiveSequence
from dcut_trt.spec.accept import accept
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.packing import pack
from dcut_trt.spec.policy import Policy
from dcut_trt.stage_types import BatchView, Draft, FeatureRows, Intent, Plan, Verified
from dcut_trt.step_values import (
    Chosen,
    Live,
    draft_input,
    drafted_each,
    for_whole_batch,
    lookups_of,
    outcome_of,
    prompt_rows,
    split,
    view_of,
)
from dcut_trt.tokenizer import Tokenizer
from dcut_trt.types import Commit, IntArray, Request, StepEvent

_NO_ROWS: IntArray = np.empty(0, np.int32)


class Engine:
    """Serves one target with one drafter. submit() and cancel() may be called from any thread, step() from one."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        tokenizer: Tokenizer,
        policy: Policy,
        *,
        max_queue: int = 256,
        prefill_chunk: int = 512,
        busy_prefill_chunk: int = 128,
        prefix_cache: bool = True,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.limits = target.limits
        self.scheduler = Scheduler(
            target.limits, max_queue, prefill_chunk, busy_prefill_chunk, prefix_cache=prefix_cache
        )
        self.trace = StepTrace(lambda: target.network_ms + drafter.network_ms)
        self.clock: Callable[[], float] = time.monotonic
        self.cost_table: CostTable | None = None  # what profiling found, for whoever asks
        self._after_prompt = False  # the latest step computed prompts
        self._observe_ms = 0.0
        self._feed_depth = 1 if target.limits.short_blocks else None
        self._policy = policy
        self.scheduler.sharing.drafting = policy.drafts

    @property
    def policy(self) -> Policy:
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        # A sequence that ran without a fed drafter has holes in its context that nothing can fill later.
        if self.has_work and policy.drafts and not self._policy.drafts:
            raise UnsupportedOption(f"policy={policy.name!r}: cannot follow {self._policy.name!r} while requests run")
        sharing = self.scheduler.sharing
        if policy.drafts and not self._policy.drafts:
            sharing.clear()  # the drafter has not seen those rows
        self._policy, sharing.drafting = policy, policy.drafts

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def free_blocks(self) -> int:
        return self.scheduler.pool.free

    def submit(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest, DuplicateRequest or QueueFull; nothing is kept then."""
        check_request(request, self.limits)
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens)
        sequence = LiveSequence(request, seed, self.limits.max_len, self.tokenizer.eos_ids, detokenizer)
        self.scheduler.add(sequence, self.clock())

    def cancel(self, request_id: str) -> bool:
        """End a request before the next step, with a final event; False when it is not live."""
        return self.scheduler.cancel(request_id)

    def close(self) -> None:
        """Release both networks."""
        self.target.close()
        self.drafter.close()

    def step(self) -> list[StepEvent]:
        """Let leavers go, or prompts advance by a chunk, or all others by at least one token (paper, Section 3.1)."""
        self.trace.start()
        now = self.clock()
        batch = self.scheduler.schedule(now)
        if batch.cancelled or batch.expired:
            return leave_events(batch, now)  # before a network runs: a step that fails must not lose these
        if batch.prefill:
            return self._prefill(batch.prefill)
        if not batch.decode:
            return []
        with self.trace.stage("select"):
            filling = self.running - len(batch.decode)
            view = view_of(batch.decode, after_prompt=self._after_prompt, filling=filling)
            self._after_prompt = False
            intent = self._policy.intend(view)
        draft = self._draft(batch.decode, intent)
        chosen = self._select(batch.decode, view, intent, draft)
        plan = chosen.plan
        verified, choice = self._verify(batch.decode, plan)
        drafted = drafted_each(intent, len(batch.decode), self.limits.draft_length)
        advanced = [
            self._advance(sequence, plan.drafts_of(row), choice.after(sequence, int(plan.cu_lens[row])), drafted[row])
            for row, sequence in enumerate(batch.decode)
        ]
        commits = self._settle(batch.decode, plan.cu_lens, verified, advanced)
        self._learn(chosen, commits)
        possible = len(batch.decode) * (self.limits.draft_length + 1)
        done = [commit for commit in commits if commit is not None]
        self.trace.finish("decode", done, len(batch.decode), plan.size, possible, plan.ratio)
        return [event for event, _ in advanced]

    def _draft(self, sequences: Live, intent: Intent) -> Draft | None:
        drafting, others = split(sequences, intent)
        # Who does not draft still feeds the drafter: so that features do not pile up, and prefixes can be shared.
        wanted = self.scheduler.sharing.take_wanted
        self._feed([sequence for sequence in others if self._many_pending(sequence) or wanted(sequence)])
        if not drafting:
            return None
        with self.trace.stage("draft"):
            draft = self.drafter.propose(draft_input(drafting, self._policy.offer(len(sequences)), depth=intent.depth))
        assert draft.plan is None or not others, "a device selects for the whole batch"
        return draft

    def _many_pending(self, sequence: LiveSequence) -> bool:
        return sequence.pending_rows >= self.scheduler.prefill_chunk

    def _feed(self, sequences: Live) -> None:
        """Give pending features to the drafter's cache, in a pass whose drafts nobody reads."""
        if sequences and self._policy.drafts:
            with self.trace.stage("draft"):
                self.drafter.propose(draft_input(sequences, depth=self._feed_depth, feed_only=True))

    def _select(self, sequences: Live, view: BatchView, intent: Intent, draft: Draft | None) -> Chosen:
        if draft is not None and draft.plan is not None:
            return Chosen(view, intent, None, None, draft.plan)
        with self.trace.stage("select"):
            batch = len(sequences)
            anchors = np.array([sequence.tokens[-1] for sequence in sequences], np.int32)
            if draft is None:
                plan = pack(anchors, np.empty((batch, 0), np.int32), np.zeros(batch, np.int32))
                return Chosen(view, intent, None, None, plan)
            selection = self._policy.select(draft, view)
            tokens, keep = (for_whole_batch(part, intent.rows, batch) for part in (draft.tokens, selection.keep))
            return Chosen(view, intent, draft, selection, pack(anchors, tokens, keep, selection.ratio))

    def _verify(self, sequences: Live, plan: Plan) -> tuple[Verified, TargetChoice]:
        with self.trace.stage("verify"):
            past = np.array([sequence.kv_len for sequence in sequences], np.int32)  # [B]
            tables = tuple(sequence.block_table for sequence in sequences)
            wanted = np.array([sequence.request.needs_logits for sequence in sequences])
            logit_rows = np.flatnonzero(wanted[plan.request_rows]).astype(np.int32) if wanted.any() else _NO_ROWS
            rows = plan.rows(past, tables)
            verified = self.target.forward(rows, _all_rows(plan.size), logit_rows)
        # Pruning saves work only if the target computes the plan's K rows and no more.
        assert len(verified.argmax) == len(verified.features) == plan.size, "the target ran other rows than planned"
        return verified, TargetChoice(verified, _all_rows(plan.size), logit_rows)

    def _advance(
        self, sequence: LiveSequence, drafts: list[int], choose: SequenceChoice, drafted: int
    ) -> tuple[StepEvent, Commit | None]:
        """Accept and commit one request; a fault in it fails this request alone."""
        request_id = sequence.request.request_id
        try:
            tokens = accept(drafts, choose)
            commit = sequence.commit(tokens, drafted, len(drafts), choose.logprobs, self.clock())
        except Exception as error:  # whatever it is, the neighbours go on
            self.scheduler.retire(sequence, failed=True)
            fault = error if isinstance(error, DcutError) else StepFailed(f"request_id={request_id!r}: {error!r}")
            return fault_event(sequence, fault, self.clock()), None
        if commit.finish is not None:
            self.scheduler.retire(sequence)
        return commit_event(sequence, commit, self.clock()), commit

    def _settle(
        self, sequences: Live, starts: IntArray, verified: Verified, advanced: list[tuple[StepEvent, Commit | None]]
    ) -> list[Commit | None]:
        """Count the rows that became part of each live sequence; the commits of this step, None of what failed."""
        for sequence, first, (_, commit) in zip(sequences, starts.tolist(), advanced, strict=False):
            if commit is not None and commit.finish is None:
                # The anchor's row and those of the accepted drafts; the newest token has not been computed yet.
                self._computed(sequence, verified.features[first : first + len(commit.tokens)])
        return [commit for _, commit in advanced]

    def _learn(self, chosen: Chosen, commits: Sequence[Commit | None]) -> None:
        if self._policy.learns:
            draft_ms, verify_ms, step_ms = (self.trace.so_far_ms(name) for name in ("draft", "verify", None))
            # The policy's own learning is part of a step; what it took last time stands for what it will take now.
            step_ms += self._observe_ms
            with self.trace.stage("select"):
                before = self.trace.so_far_ms(None)
                self._policy.observe(outcome_of(chosen, commits, draft_ms, verify_ms, step_ms))
                self._observe_ms = self.trace.so_far_ms(None) - before

    def _computed(self, sequence: LiveSequence, features: FeatureRows) -> None:
        sequence.computed(len(features), features.copy() if self._policy.drafts else None)

    def _prefill(self, parts: Sequence[PrefillPart]) -> list[StepEvent]:
        """Compute a chunk of prompt rows; a prompt that is complete gets its first token."""
        self._after_prompt = True
        rows, ends = prompt_rows(parts)
        complete = [index for index, part in enumerate(parts) if part.last]
        wanted = [parts[index].sequence.request.needs_logits for index in complete]
        logit_rows = np.flatnonzero(np.array(wanted, bool)).astype(np.int32)
        with self.trace.stage("verify"):
            verified = self.target.forward(rows, ends[complete], logit_rows)
        for part, end in zip(parts, ends.tolist(), strict=True):
            self._computed(part.sequence, verified.features[end + 1 - part.length : end + 1])
        self._feed([part.sequence for part in parts if not part.last and self._many_pending(part.sequence)])
        choice = TargetChoice(verified, ends[complete], logit_rows)
        advanced = [
            self._advance(parts[index].sequence, [], choice.after(parts[index].sequence, head), 0)
            for head, index in enumerate(complete)
        ]
        commits = [commit for _, commit in advanced if commit is not None]
        lookups = lookups_of(parts, self.scheduler.sharing.enabled)
        self.trace.finish("prefill", commits, len(parts), len(rows.token_ids), len(rows.token_ids), None, lookups)
        return [event for event, _ in advanced]


@functools.lru_cache(maxsize=256)
def _all_rows(size: int) -> IntArray:
    """0 .. size - 1, the same array each time: a backend need not bind again what it has bound already."""
    return np.arange(size, dtype=np.int32)
