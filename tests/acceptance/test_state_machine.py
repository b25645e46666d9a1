"""Anything that clients and faults can do, in any order: streams stay right, and everything comes back at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from poison import poison_unowned
from scripted_runs import EOS, POLICIES, Stream, expected, letters, letters_script

from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.engine import Engine
from dcut_trt.errors import DeadlineExceeded, DuplicateRequest, QueueFull, StepFailed
from dcut_trt.spec.policies import make_policy
from dcut_trt.types import FinishReason, Request, SamplingParams, StepEvent, Usage

MAX_LEN = 64
NAMES = [f"r{index}" for index in range(12)]
SCRIPT = letters_script()

samplings = st.one_of(
    st.just(SamplingParams()),
    st.builds(SamplingParams, st.sampled_from([0.7, 1.0]), st.integers(0, 3), seed=st.integers(0, 99)),
)
prompts = st.builds(
    lambda shared, own: letters(shared + own),
    st.sampled_from(["", "abcd", "abcdabcd", "abcdabcdabcdabcdabcd"]),
    st.text("ab", min_size=1, max_size=12),
)
# Drafting ones: a policy that drafts may follow another while requests run.
drafting = st.sampled_from(POLICIES[1:])


class Serving(RuleBasedStateMachine):
    """One engine with little memory, short blocks, a clock of its own, and faults that are put in by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.poison_logits = self.break_text = self.break_target = False
        self.requests: dict[str, Request] = {}
        self.streams: dict[str, Stream] = {}
        self.cancelled: set[str] = set()
        self.faults = 0
        self.engine = self._new_engine()

    def _new_engine(self) -> Engine:
        engine = scripted_engine(
            "ratio:0.5",
            script=SCRIPT,
            max_batch=4,
            max_len=MAX_LEN,
            max_queue=4,
            num_blocks=36,
            block_size=4,
            prefill_chunk=12,
            busy_prefill_chunk=5,
        )
        engine.clock = lambda: self.now
        forward, decode = engine.target.forward, engine.tokenizer.decode

        def faulty_forward(*arguments: Any) -> Any:
            if self.break_target:
                raise RuntimeError("the device is gone")
            verified = forward(*arguments)
            if self.poison_logits and len(verified.logits):
                verified.logits[0] = np.nan
                self.poison_logits = False
                self.faults += 1
            return verified

        def faulty_decode(*arguments: Any, **options: Any) -> str:
            if self.break_text:
                self.break_text = False
                self.faults += 1
                raise ZeroDivisionError
            return decode(*arguments, **options)

        engine.target.forward = faulty_forward  # type: ignore[method-assign]
        engine.tokenizer.decode = faulty_decode  # type: ignore[method-assign]
        return engine

    @rule(
        name=st.sampled_from(NAMES),
        prompt=prompts,
        max_tokens=st.integers(1, 40),
        sampling=samplings,
        priority=st.integers(-5, 5),
        patience=st.one_of(st.none(), st.floats(0, 20)),
        stop=st.lists(st.sampled_from(["ab", "c ", "bca"]), max_size=2, unique=True),
        ignore_eos=st.booleans(),
    )
    def submit(
        self,
        name: str,
        prompt: tuple[int, ...],
        max_tokens: int,
        sampling: SamplingParams,
        priority: int,
        patience: float | None,
        stop: list[str],
        ignore_eos: bool,
    ) -> None:
        request = Request(
            name,
            prompt,
            max_tokens,
            sampling,
            stop=tuple(stop),
            ignore_eos=ignore_eos,
            deadline=None if patience is None else self.now + patience,
            priority=priority,
        )
        live = self.engine.scheduler.live_ids()
        try:
            self.engine.submit(request)
        except DuplicateRequest:
            assert name in live
        except QueueFull:
            assert len(live) == 8
        else:
            assert name not in live
            self.requests[name], self.streams[name] = request, Stream()
            self.cancelled.discard(name)

    @rule(name=st.sampled_from(NAMES))
    def cancel(self, name: str) -> None:
        live = name in self.engine.scheduler.live_ids()
        assert self.engine.cancel(name) == live
        if live:
            self.cancelled.add(name)

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=drafting)
    def change_policy(self, name: str) -> None:
        self.engine.policy = make_policy(name, None)

    @rule()
    def poison_a_row(self) -> None:
        self.poison_logits = True

    @rule()
    def break_the_text_of_somebody(self) -> None:
        self.break_text = True

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @rule()
    def drain(self) -> None:
        self._drain()

    @precondition(lambda self: self.engine.has_work and not self.cancelled)
    @rule()
    def break_the_target(self) -> None:
        """Who drives the engine ends all streams then; here too they can be cancelled, and all blocks come back."""
        self.break_target = True
        try:
            self._step()
        except RuntimeError:
            for name in self.engine.scheduler.live_ids():
                self.engine.cancel(name)
                self.cancelled.add(name)
            self._step()
            self._check_empty()
            self.break_target = False
            self.engine = self._new_engine()
        self.break_target = False

    @invariant()
    def blocks_and_lists_add_up(self) -> None:
        self.engine.scheduler.check_invariants()
        open_streams = {name for name, stream in self.streams.items() if stream.finish is None and stream.error is None}
        assert open_streams == set(self.engine.scheduler.live_ids())

    def teardown(self) -> None:
        self._drain()
        self._check_empty()
        for name in self.requests:
            self._check_outcome(name)

    def _step(self) -> None:
        poison_unowned(self.engine)
        for event in self.engine.step():
            self._receive(event)
        self.engine.scheduler.check_invariants()

    def _drain(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                return
            self._step()
        raise AssertionError("the engine does not come to an end")

    def _receive(self, event: StepEvent) -> None:
        stream = self.streams[event.request_id]
        before = stream.usage or Usage(0, 0, 0, 0, 0, 0)
        stream.add(event)  # which refuses an event after the last one
        usage = event.usage
        assert 0 <= usage.accepted <= usage.verified <= usage.drafted
        assert usage.drafted % self.engine.limits.draft_length == 0
        assert before.steps <= usage.steps
        assert usage.output_tokens >= len(stream.tokens)
        assert usage.cached_tokens <= usage.prompt_tokens - 1
        if event.error is None:
            assert usage.output_tokens == len(stream.tokens)
        if event.final:
            self._check_outcome(event.request_id)
            self.cancelled.discard(event.request_id)

    def _check_outcome(self, name: str) -> None:
        request, stream = self.requests[name], self.streams[name]
        tokens, text, finish = expected(SCRIPT, request, MAX_LEN)
        if isinstance(stream.error, StepFailed):
            assert self.faults > 0
        elif isinstance(stream.error, DeadlineExceeded):
            assert request.deadline is not None
            assert self.now >= request.deadline
        elif stream.finish is not FinishReason.ABORTED:
            assert stream.error is None
            assert stream.outcome == (tokens, text, finish)
            return
        assert stream.tokens == tokens[: len(stream.tokens)]
        assert EOS not in stream.tokens[:-1] or request.ignore_eos

    def _check_empty(self) -> None:
        scheduler = self.engine.scheduler
        assert not any((scheduler._live, scheduler._cancelled, scheduler.running, scheduler.waiting))
        assert not scheduler.sharing._offered
        assert self.engine.free_blocks == scheduler.pool.num_blocks


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=120, stateful_step_count=60, derandomize=True, deadline=None)
