"""The engine over the scripted model: whatever is speculated, every request gives what it gives alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scripted_runs import (
    EOS,
    POLICIES,
    checked_step,
    expected,
    letters,
    letters_script,
    requests,
    run_all,
)

from dcut_trt.backends.scripted import Script, scripted_engine
from dcut_trt.errors import UnsupportedOption
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.packing import budget, pack
from dcut_trt.spec.policies import make_policy
from dcut_trt.spec.selector import choose_ratio, keep_depths, prefix_log_scores, rank
from dcut_trt.stage_types import Draft, DraftInput
from dcut_trt.types import FinishReason, Request, SamplingParams

MAX_LEN = 96
RATIOS = (0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_eos_at_every_offset_of_a_block(policy: str) -> None:
    script = Script(258, EOS, 1e9, seed=11)
    for offset in range(1, 18):
        request = Request("r", letters("a"), 30)
        plain, _, _ = expected(script, request)
        ending = Script(258, EOS, 1e9, seed=11)
        state = ending.state([*request.prompt_ids, *plain[:offset]])
        ending.logits[state, EOS] = 99.0
        ending.argmax[state] = EOS
        engine = scripted_engine(policy, script=ending, accuracy=1.0)
        stream = run_all(engine, request)["r"]
        assert stream.tokens == [*plain[:offset], EOS]
        assert stream.finish is FinishReason.STOP


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prefill_chunk", [7, 64])
def test_prompts_up_to_the_context_limit_end_there_and_disturb_nobody(policy: str, prefill_chunk: int) -> None:
    script = letters_script(1e9)
    block = 8
    crowd = [
        Request(f"r{short}", tuple(range(65, 65 + MAX_LEN - short)), 50, ignore_eos=True)
        for short in range(1, block + 2)
    ]
    neighbour = Request("neighbour", letters("hello"), 60)
    engine = scripted_engine(policy, script=script, max_len=MAX_LEN, accuracy=0.9, prefill_chunk=prefill_chunk)
    streams = run_all(engine, neighbour, *crowd)
    for short, request in enumerate(crowd, start=1):
        stream = streams[request.request_id]
        assert stream.outcome == expected(script, request, MAX_LEN)
        assert (len(stream.tokens), stream.finish) == (short, FinishReason.LENGTH)
    assert streams["neighbour"].outcome == expected(script, neighbour, MAX_LEN)


@pytest.mark.parametrize("policy", ["plain", "dflash"])
def test_prompt_chunks_and_decode_steps_take_turns(policy: str) -> None:
    engine = scripted_engine(policy, prefill_chunk=16, mean_length=1e9)
    engine.submit(Request("streaming", letters("hi"), 200))
    checked_step(engine)
    engine.submit(Request("long", (65,) * 100, 5))
    engine.trace.reset()
    while not any(event.request_id == "long" for event in checked_step(engine)):
        assert engine.trace.totals.steps < 50
    kinds = [record.kind for record in engine.trace.records]
    assert kinds.count("prefill") == 7
    assert all("decode" in pair for pair in pairwise(kinds))
    assert max(record.rows for record in engine.trace.records if record.kind == "prefill") == 16


class SelectingDrafter:
    """Selects and packs by itself from what the policy offers, as a drafter on a device does."""

    network_ms = 0.0

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.plans = 0

    def propose(self, drafts: DraftInput) -> Draft:
        draft = self._inner.propose(drafts)
        if drafts.offer is None:
            return Draft(draft.tokens, draft.confidence)
        batch, length = draft.tokens.shape
        scores = prefix_log_scores(draft.confidence)
        ranked = rank(scores)
        ratio = drafts.offer.ratios[choose_ratio(scores, ranked, drafts.offer.ratios, drafts.offer.cost_ms)]
        keep = keep_depths(ranked, budget(ratio, batch, length + 1), batch)
        self.plans += 1
        # Nobody may look at tokens and confidence again: they have not left the device.
        nothing = np.empty((0, 0), np.int32)
        return Draft(nothing, nothing.astype(np.float32), pack(drafts.anchors, draft.tokens, keep, ratio))

    def close(self) -> None: ...


@pytest.mark.parametrize("name", ["dflash", "ratio:0.5", "dcut"])
def test_a_drafter_that_selects_by_itself_is_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = letters_script()
    table = CostTable((1,), RATIOS, np.array([[5.0, 6.0, 6.5, 6.8]]), np.ones(1), "here", "now")
    engine = scripted_engine(make_policy(name, table), script=script, prefill_chunk=8)
    engine.drafter = SelectingDrafter(engine.drafter)
    monkeypatch.setattr(engine.policy, "select", None)  # the host has nothing left to select
    crowd = [*requests(4), Request("sampled", letters("a long prompt here"), 40, SamplingParams(1.0, seed=3))]
    streams = run_all(engine, *crowd)
    for request in crowd:
        assert streams[request.request_id].outcome == expected(script, request)
    decodes = [record for record in engine.trace.records if record.kind == "decode"]
    assert engine.drafter.plans == len(decodes) > 0


def test_a_policy_that_drafts_cannot_follow_one_that_does_not_while_requests_run() -> None:
    engine = scripted_engine("plain", mean_length=1e9)
    engine.submit(Request("r", letters("a"), 50))
    checked_step(engine)
    with pytest.raises(UnsupportedOption, match="dflash"):
        engine.policy = make_policy("dflash", None)
    engine.cancel("r")
    checked_step(engine)
    engine.policy = make_policy("dflash", None)


def test_policies_that_draft_may_change_between_any_two_steps() -> None:
    script = letters_script()
    engine = scripted_engine("dflash", script=script)
    crowd = requests(5)
    for request in crowd:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in crowd}
    step = 0
    while engine.has_work:
        engine.policy = make_policy(POLICIES[1 + step % 5], None)
        for event in checked_step(engine):
            tokens[event.request_id].extend(event.tokens)
        step += 1
    for request in crowd:
        assert tokens[request.request_id] == expected(script, request)[0]


def test_an_idle_step_does_nothing() -> None:
    engine = scripted_engine()
    assert engine.step() == []
    assert engine.target.calls == []  # type: ignore[attr-defined]
