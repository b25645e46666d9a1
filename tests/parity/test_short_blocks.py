"""A causal drafter asked for less drafts the first tokens of its whole block; any mixture serves the same text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dcut_trt.backends.openvino import load_openvino
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.manifest import read_manifest
from dcut_trt.spec.policy import NO_DRAFT, Steady
from dcut_trt.spec.rules import FixedDepth, Plain
from dcut_trt.stage_types import BatchView, Draft, Intent, Offer, Selection
from dcut_trt.step_values import draft_input
from dcut_trt.tokenizer import Tokenizer
from dcut_trt.types import Request

PROMPTS = ("The capital of France is", "def fibonacci(n):", "1, 2, 3, 4, 5, 6,")


@pytest.fixture(scope="module")
def engine(smollm2_bundle_fp32: Path) -> Iterator[Engine]:
    manifest = read_manifest(smollm2_bundle_fp32)
    target, drafter = load_openvino(smollm2_bundle_fp32, manifest, EngineOptions())
    engine = Engine(target, drafter, Tokenizer.load(smollm2_bundle_fp32, manifest.tokenizer), FixedDepth())
    yield engine
    engine.close()


class Turns(Steady):
    """Each step another depth, now for all, now for some, now for nobody; verifies all that was drafted."""

    name = "turns"

    def __init__(self) -> None:
        self.step = 0

    def intend(self, view: BatchView) -> Intent:
        self.step += 1
        depth = self.step % 8
        rows = np.arange(self.step % view.batch, view.batch, dtype=np.int32)
        return NO_DRAFT if depth == 0 else Intent(depth, rows)

    def select(self, draft: Draft, view: BatchView) -> Selection:
        return Selection(np.full(len(draft.tokens), draft.tokens.shape[1], np.int32), None)

    def offer(self, batch: int) -> Offer | None:
        return None


def serve(engine: Engine) -> dict[str, list[int]]:
    for text in PROMPTS:
        engine.submit(Request(text, tuple(engine.tokenizer.encode(text)), 40, ignore_eos=True))
    tokens: dict[str, list[int]] = {text: [] for text in PROMPTS}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id].extend(event.tokens)
    return tokens


def test_fewer_tokens_are_the_first_of_the_block(engine: Engine) -> None:
    for text in PROMPTS:
        engine.submit(Request(text, tuple(engine.tokenizer.encode(text)), 40, ignore_eos=True))
    for _ in range(6):
        engine.step()
    running = engine.scheduler.running
    assert len(running) == len(PROMPTS)
    whole = engine.drafter.propose(draft_input(running))
    for depth in (1, 2, 5, 7):
        nothing = tuple((np.empty((0, engine.limits.feature_size), np.float32),) for _ in running)
        short = engine.drafter.propose(replace(draft_input(running, depth=depth), features=nothing))
        np.testing.assert_array_equal(short.tokens, whole.tokens[:, :depth])
        np.testing.assert_allclose(short.confidence, whole.confidence[:, :depth], atol=1e-5)
    for sequence in running:
        engine.cancel(sequence.request.request_id)
    engine.step()


def test_text_is_plain_decoding_s_whoever_drafts_how_far(engine: Engine) -> None:
    assert engine.limits.short_blocks
    engine.policy = Plain()
    plain = serve(engine)
    engine.policy = Turns()
    assert serve(engine) == plain
    assert engine.trace.totals.accepted > 0
