"""The OpenVINO target against transformers: prefill, chunked prefill, decoding and ragged verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from graph_runner import PagedRunner, TargetRows, run_target
from tiny_targets import FloatArray, TinyTarget, tiny_llama, tiny_qwen3

from dcut_engines.emit_openvino import PagedGraph, emit_target

TOLERANCE = 1e-4
LENGTHS = (75, 41, 64)  # across block boundaries of 32, and one on it
LAYERS = (0, 2)
TARGETS: dict[str, Callable[[], TinyTarget]] = {
    "llama": tiny_llama,
    "llama_tied_biased": lambda: tiny_llama(tied=True, attention_bias=True),
    "qwen3": tiny_qwen3,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A target, its compiled graph, and token sequences with what transformers says of every row."""

    target: TinyTarget
    runner: PagedRunner
    sequences: list[list[int]]
    logits: list[FloatArray]
    features: list[FloatArray]

    def rows(self, past: list[int], ends: list[int]) -> list[TargetRows]:
        return [TargetRows(i, p, self.sequences[i][p:end]) for i, (p, end) in enumerate(zip(past, ends, strict=True))]

    def check(self, past: list[int], ends: list[int]) -> None:
        outputs = run_target(self.runner, self.rows(past, ends))
        logits = np.concatenate([full[p:e] for full, p, e in zip(self.logits, past, ends, strict=True)])
        features = np.concatenate([full[p:e] for full, p, e in zip(self.features, past, ends, strict=True)])
        np.testing.assert_allclose(outputs["logits"], logits, atol=TOLERANCE, rtol=TOLERANCE)
        np.testing.assert_allclose(outputs["features"], features, atol=TOLERANCE, rtol=TOLERANCE)
        np.testing.assert_array_equal(outputs["argmax"], outputs["logits"].argmax(-1))


@pytest.fixture(scope="module", params=TARGETS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    target = TARGETS[request.param]()
    path = tmp_path_factory.mktemp("target") / "target.xml"
    emit_target(target.config, target.weights, LAYERS, "fp32", 512, path)
    rng = np.random.default_rng(3)
    sequences = [rng.integers(target.config.vocab_size, size=length).tolist() for length in LENGTHS]
    logits = [target.reference(tokens)[0] for tokens in sequences]
    features = [target.features(tokens, LAYERS) for tokens in sequences]
    return Case(target, PagedRunner(path), sequences, logits, features)


def test_whole_prefill(case: Case) -> None:
    case.check([0, 0, 0], list(LENGTHS))


def test_chunked_prefill_then_decode(case: Case) -> None:
    case.check([0, 0, 0], [40, 1, 31])
    case.check([40, 1, 31], [70, 33, 32])
    case.check([70, 33, 32], [71, 34, 33])
    case.check([71, 34, 33], [75, 35, 64])


def test_ragged_verification_with_rejected_drafts(case: Case) -> None:
    """Random depths; rejected rows stay in the cache until the next step overwrites them."""
    rng = np.random.default_rng(11)
    past = [5, 2, 31]
    run_target(case.runner, case.rows([0, 0, 0], past))
    for _ in range(8):
        rows, accepted = [], []
        for request, p in enumerate(past):
            depth = int(rng.integers(0, 8))
            matching = int(rng.integers(0, depth + 1))
            drafts = case.sequences[request][p + 1 : p + 1 + matching]
            drafts += rng.integers(case.target.config.vocab_size, size=depth - matching).tolist()
            rows.append(TargetRows(request, p, [case.sequences[request][p], *drafts]))
            accepted.append(matching + 1)
        outputs = run_target(case.runner, rows)
        references = [case.target.reference(case.sequences[row.request][: row.past] + list(row.tokens)) for row in rows]
        logits = np.concatenate([logits[row.past :] for row, (logits, _) in zip(rows, references, strict=True)])
        np.testing.assert_allclose(outputs["logits"], logits, atol=TOLERANCE, rtol=TOLERANCE)
        past = [min(p + step, length - 8) for p, step, length in zip(past, accepted, LENGTHS, strict=True)]


def test_only_the_wanted_rows_meet_the_vocabulary(case: Case) -> None:
    rows = case.rows([0, 0, 0], [9, 4, 12])
    full = run_target(case.runner, rows)
    wanted = [8, 12, 24]
    for logit_rows in ([], [2, 0], [], [1]):  # one infer request, from none to some and back
        outputs = run_target(case.runner, rows, head_rows=wanted, logit_rows=logit_rows)
        np.testing.assert_array_equal(outputs["argmax"], full["argmax"][wanted])
        assert outputs["logits"].shape == (len(logit_rows), case.target.config.vocab_size)
        picked = [wanted[row] for row in logit_rows]
        np.testing.assert_allclose(outputs["logits"], full["logits"][picked], atol=TOLERANCE, rtol=TOLERANCE)


def test_block_tables_may_be_longer_than_needed(case: Case) -> None:
    first = run_target(case.runner, case.rows([0, 0, 0], [9, 33, 12]), spare=2)
    second = run_target(case.runner, case.rows([9, 33, 12], [10, 41, 20]), spare=2)
    for outputs, past, ends in ((first, [0, 0, 0], [9, 33, 12]), (second, [9, 33, 12], [10, 41, 20])):
        logits = np.concatenate([full[p:e] for full, p, e in zip(case.logits, past, ends, strict=True)])
        np.testing.assert_allclose(outputs["logits"], logits, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_prefill_chunk_may_want_no_token(case: Case) -> None:
    outputs = run_target(case.runner, case.rows([0, 0, 0], [33, 8, 2]), head_rows=[])
    assert outputs["argmax"].shape == (0,)
    case.check([33, 8, 2], [40, 9, 5])


@pytest.mark.parametrize("layers", [(), (1,), (2, 0, 1)])
def test_features_are_the_listed_layers_in_order(layers: tuple[int, ...], tmp_path: Path) -> None:
    target = tiny_llama()
    names = emit_target(target.config, target.weights, layers, "fp32", 512, tmp_path / "target.xml")
    assert names["outputs"] == ["argmax", "logits", "features"][: 3 if layers else 2]
    tokens = list(range(20))
    outputs = run_target(PagedRunner(tmp_path / "target.xml"), [TargetRows(0, 0, tokens)])
    if layers:
        np.testing.assert_allclose(outputs["features"], target.features(tokens, layers), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("vocab", [97, 512, 768])
def test_argmax_is_the_first_of_equals(vocab: int, tmp_path: Path) -> None:
    graph = PagedGraph(tiny_llama().config, {}, "fp32", 1)
    token, peak = graph.argmax(graph.parameter("logits", [-1, vocab], ov.Type.f32))
    graph.save({"token": token, "peak": peak}, tmp_path / "argmax.xml")
    logits = np.random.default_rng(0).integers(-9, 9, size=(40, vocab)).astype(np.float32)
    outputs = PagedRunner(tmp_path / "argmax.xml").run({"logits": logits})
    np.testing.assert_array_equal(outputs["token"], logits.argmax(-1))
    np.testing.assert_array_equal(outputs["peak"], logits.max(-1))


@pytest.mark.parametrize("vocab", [97, 128, 512, 768])
def test_margin_is_to_the_second_best(vocab: int, tmp_path: Path) -> None:
    """97: one logit in each group; 128: one group. Equal logits leave no margin."""
    graph = PagedGraph(tiny_llama().config, {}, "fp32", 1)
    logits = graph.parameter("logits", [-1, vocab], ov.Type.f32)
    _, peak = graph.argmax(logits)
    graph.save({"margin": graph.margin(logits, peak, graph.peak_probability(logits, peak))}, tmp_path / "margin.xml")
    values = np.random.default_rng(0).normal(0, 4, size=(60, vocab)).astype(np.float32)
    values[:10] = values[:10].round()
    values[::2, 1] = values[::2].max(axis=1) + 0.5  # beside its second in many rows, far from it in others
    values[::4, 0] = values[::4].max(axis=1) - 0.25
    margin = PagedRunner(tmp_path / "margin.xml").run({"logits": values})["margin"]
    probability = np.exp(values - values.max(axis=1, keepdims=True))
    best = np.sort(probability / probability.sum(axis=1, keepdims=True), axis=1)
    np.testing.assert_allclose(margin, best[:, -1] - best[:, -2], atol=1e-6)


def test_bf16_follows_fp32(tmp_path: Path) -> None:
    """Half the file, and the same model up to bf16's rounding (8 bits) through three layers."""
    target = tiny_qwen3()
    path, full_path = tmp_path / "bf16.xml", tmp_path / "fp32.xml"
    emit_target(target.config, target.weights, LAYERS, "bf16", 512, path)
    emit_target(target.config, target.weights, LAYERS, "fp32", 512, full_path)
    rows = [TargetRows(0, 0, list(range(50))), TargetRows(1, 0, list(range(40, 60)))]
    runner, full = PagedRunner(path, precision="bf16"), run_target(PagedRunner(full_path), rows)
    outputs = run_target(runner, rows)
    assert {str(port.element_type) for port in runner.compiled.inputs if "cache" in port.any_name} == {
        "<Type: 'bfloat16'>"
    }
    for name in ("logits", "features"):
        error = np.sqrt(np.mean((outputs[name] - full[name]) ** 2) / np.mean(full[name] ** 2))
        assert error < 0.03, name


def test_a_tied_embedding_is_stored_once(tmp_path: Path) -> None:
    target = tiny_llama(tied=True)
    path = tmp_path / "target.xml"
    emit_target(target.config, target.weights, LAYERS, "fp32", 8, path)
    weights = sum(array.nbytes for array in target.weights.values())
    assert path.with_suffix(".bin").stat().st_size < weights + target.weights["model.embed_tokens.weight"].nbytes / 2
