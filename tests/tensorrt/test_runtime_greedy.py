"""The TensorRT backend on the double: not one token differs from plain decoding, nor from OpenVINO's."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from double_bundles import MAX_BATCH, open_double, open_engine, tiny_bundle

from dcut_trt.backends.openvino import load_openvino
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.manifest import read_manifest
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.policies import make_policy
from dcut_trt.spec.policy import NO_DRAFT, WHOLE_BLOCK, Policy
from dcut_trt.spec.profiler import profile
from dcut_trt.spec.rules import FixedRatio
from dcut_trt.stage_types import BatchView, Intent, Offer
from dcut_trt.tokenizer import Tokenizer
from dcut_trt.types import Request, SamplingParams

RATIOS = (0.25, 0.5, 0.75, 1.0)
# Not measured: costs so close together that dcut's choice changes from step to step.
TABLE = CostTable((1,), RATIOS, np.array([[10.0, 11.2, 12.4, 13.6]]), np.array([9.0]), "fixed", "never")
POLICIES = ("dflash", "ratio:0.25", "ratio:0.4", "ratio:0.5", "ratio:0.75", "dcut")

Outputs = dict[str, list[int]]


class HostRatio(FixedRatio):
    """A policy that no device can follow: it selects on the host."""

    def offer(self, batch: int) -> Offer | None:  # type: ignore[override]
        return None


class Sometimes(FixedRatio):
    """Drafts in some steps, decodes plainly in the others; features pile up in between."""

    def __init__(self, ratio: float) -> None:
        super().__init__(ratio)
        self.asked = 0

    def intend(self, view: BatchView) -> Intent:
        self.asked += 1
        return WHOLE_BLOCK if self.asked % 9 >= 7 else NO_DRAFT


def requests(number: int = 14, sampled: bool = False) -> list[Request]:
    """Prompts and outputs of many lengths, so that nobody joins or leaves together."""
    rng = np.random.default_rng(5)
    made = []
    for index in range(number):
        prompt = rng.integers(0, 260, rng.choice([1, 2, 7, 16, 17, 30])).tolist()
        sampling = SamplingParams(0.8 if sampled and index % 2 else 0.0, seed=index)
        made.append(Request(f"r{index}", tuple(prompt), int(rng.integers(1, 34)), sampling, ignore_eos=True))
    return made


def serve(engine: Engine, asked: list[Request], width: int = MAX_BATCH, cancel: tuple[str, ...] = ()) -> Outputs:
    """Tokens of every request, one joining per step while fewer than `width` are live; those of `cancel` leave."""
    waiting = list(reversed(asked))
    tokens: Outputs = {request.request_id: [] for request in asked}
    while waiting or engine.has_work:
        if waiting and len(engine.scheduler.live_ids()) < width:
            engine.submit(waiting.pop())
        for event in engine.step():
            assert event.error is None
            tokens[event.request_id].extend(event.tokens)
            if event.request_id in cancel and not event.final:
                engine.cancel(event.request_id)
    engine.scheduler.check_invariants()
    return tokens


@functools.cache
def alone(architecture: str, sampled: bool = False) -> Outputs:
    """Every request alone, without speculation."""
    return serve(open_engine(open_double(), tiny_bundle(architecture)), requests(sampled=sampled), 1)


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "no-graphs"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_no_token_differs_from_plain(architecture: str, cuda_graphs: bool) -> None:
    runtime = open_double(cuda_graphs=cuda_graphs)
    engine = open_engine(runtime, tiny_bundle(architecture))
    assert serve(engine, requests()) == alone(architecture)
    for name in POLICIES:
        engine.trace.reset()
        engine.policy = make_policy(name, TABLE)
        assert serve(engine, requests()) == alone(architecture), name
        records = [record for record in engine.trace.records if record.kind == "decode"]
        assert max(record.batch for record in records) == MAX_BATCH
        if name == "dcut":
            assert len({record.ratio for record in records}) >= 2
        if name not in ("ratio:0.25", "dcut"):
            assert max(record.accepted for record in records) >= 3
    assert bool(runtime.device.graphs) == cuda_graphs
    assert len(runtime.device.moved) > 20


def test_tensorrt_rtx_needs_no_plugin() -> None:
    engine = open_engine(open_double("tensorrt-rtx"), tiny_bundle("llama", "tensorrt-rtx"), "dflash")
    assert serve(engine, requests()) == alone("llama")


@pytest.mark.parametrize("policy", [HostRatio(0.5), Sometimes(0.5)], ids=["host", "sometimes"])
def test_steps_that_the_host_packs(policy: Policy) -> None:
    engine = open_engine(open_double(), tiny_bundle(), policy)
    assert serve(engine, requests()) == alone("llama")
    assert engine.trace.totals.accepted > 0


@pytest.mark.parametrize("name", ["plain", "dflash", "ratio:0.5"])
def test_a_seed_gives_the_same_tokens_alone_and_beside_greedy_requests(name: str) -> None:
    engine = open_engine(open_double(), tiny_bundle(), name)
    outputs = serve(engine, requests(sampled=True))
    assert outputs == alone("llama", sampled=True)
    assert outputs != alone("llama")


def test_those_who_are_cancelled_leave_no_trace() -> None:
    engine = open_engine(open_double(), tiny_bundle(), "dflash")
    cancelled = ("r1", "r4", "r6", "r9")
    outputs = serve(engine, requests(), cancel=cancelled)
    expected = alone("llama")
    for name, tokens in outputs.items():
        assert tokens == expected[name][: len(tokens)]
        assert name in cancelled or len(tokens) == len(expected[name])


def test_the_precision_of_a_real_build() -> None:
    """fp16 computes a near-tie either way, so that a request may differ; these weights leave few near-ties."""
    engine = open_engine(open_double(), tiny_bundle("llama", "tensorrt", "fp16"), "ratio:0.75")
    outputs, expected = serve(engine, requests()), alone("llama")
    assert sum(outputs[name] != tokens for name, tokens in expected.items()) <= 1
    assert engine.trace.totals.accepted > 20


def openvino_engine(policy: Policy) -> Engine:
    path = tiny_bundle("llama", "openvino")
    manifest = read_manifest(path)
    networks = load_openvino(path, manifest, EngineOptions(kv_memory_mib=64))
    return Engine(*networks, Tokenizer.load(path, manifest.tokenizer), policy, prefill_chunk=24)


@pytest.mark.parametrize("name", ["dflash", "sometimes"])
def test_openvino_drafts_and_says_the_same(name: str) -> None:
    """Wrong features would not change a token, but what is drafted."""
    steps = []
    for open_with in (openvino_engine, functools.partial(open_engine, open_double(), tiny_bundle())):
        engine = open_with(Sometimes(1.0) if name == "sometimes" else make_policy(name, None))
        assert serve(engine, requests()) == alone("llama")
        steps.append([(record.kind, record.batch, record.kept, record.accepted) for record in engine.trace.records])
    assert steps[0] == steps[1]


def test_the_profiler_measures_every_bucket() -> None:
    engine = open_engine(open_double(), tiny_bundle(), "dflash")
    table = profile(engine, RATIOS, "here")
    assert table.batches[0] == 1
    assert table.ratios == RATIOS
    assert serve(engine, requests()) == alone("llama")
