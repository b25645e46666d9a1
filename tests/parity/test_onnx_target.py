"""The ONNX target under ONNX Runtime, in fp32, against Hugging Face transformers on tiny random models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_targets import TinyTarget, tiny_llama, tiny_qwen3
from window_runner import Arrays, WindowRunner, i32

from dcut_engines.emit_onnx import emit_target

TOLERANCE = 1e-4  # absolute, on logits and features of order one, fp32 on both sides
MAX_LEN = 96
WINDOW = 8
FEATURE_LAYERS = (0, 2)
TARGETS = {
    "llama3": tiny_llama,
    "llama3-tied-bias": lambda: tiny_llama(tied=True, attention_bias=True),
    "qwen3": tiny_qwen3,
}


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> TinyTarget:
    return TARGETS[request.param]()


@pytest.fixture(scope="module")
def graphs(target: TinyTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, Path]:
    """By window: the verify graph with its own, and one whose calls choose."""
    folder = tmp_path_factory.mktemp("onnx")
    paths: dict[int | None, Path] = {WINDOW: folder / "verify.onnx", None: folder / "any.onnx"}
    for window, path in paths.items():
        emit_target(*(target.config, target.weights, FEATURE_LAYERS, "fp32", 128, path), max_len=MAX_LEN, window=window)
    return paths


def random_tokens(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 97, count)]


def check_rows(target: TinyTarget, outputs: Arrays, sequences: list[list[int]], new: list[int]) -> None:
    """The packed outputs are those of the last new[b] tokens of each whole sequence."""
    row = 0
    for sequence, count in zip(sequences, new, strict=True):
        logits, after = target.reference(sequence)
        tail = slice(len(sequence) - count, None)
        features = np.concatenate([after[layer] for layer in FEATURE_LAYERS], axis=1)
        own = slice(row, row + count)
        np.testing.assert_allclose(outputs["logits"][own], logits[tail], atol=TOLERANCE)
        np.testing.assert_allclose(outputs["features"][own], features[tail], atol=TOLERANCE)
        np.testing.assert_array_equal(outputs["argmax"][own], outputs["logits"][own].argmax(-1))
        row += count


def test_prefill_of_ragged_prompts(target: TinyTarget, graphs: dict[int | None, Path]) -> None:
    prompts = [random_tokens(count, seed) for seed, count in enumerate((23, 1, 40))]
    outputs = WindowRunner(graphs[None], 3).target(prompts, [0, 0, 0])
    check_rows(target, outputs, prompts, [23, 1, 40])


def test_chunked_prefill_then_decode_across_both_graphs(target: TinyTarget, graphs: dict[int | None, Path]) -> None:
    sequences = [random_tokens(count, seed) for seed, count in enumerate((30, 21))]
    prefill, verify = WindowRunner(graphs[None], 2), WindowRunner(graphs[WINDOW], 2)
    done = [0, 0]
    for step, counts in enumerate([(17, 5), (3, 11), (1, 1), (1, 1), (8, 3)]):
        runner = prefill if step < 2 else verify
        runner.caches = prefill.caches if step == 2 else runner.caches
        ends = [start + count for start, count in zip(done, counts, strict=True)]
        chunks = [sequence[start:end] for sequence, start, end in zip(sequences, done, ends, strict=True)]
        outputs = runner.target(chunks, done)
        check_rows(target, outputs, [s[:end] for s, end in zip(sequences, ends, strict=True)], list(counts))
        done = ends


@pytest.mark.parametrize("seed", [0, 1])
def test_verification_at_random_depths(target: TinyTarget, graphs: dict[int | None, Path], seed: int) -> None:
    """Random keep depths, random acceptance; rows past the kept depth are noise in one run, and change no bit."""
    rng = np.random.default_rng(seed)
    committed = [random_tokens(count, 10 * seed + row) for row, count in enumerate((9, 2, 30, 1))]
    prefill = WindowRunner(graphs[None], 4)
    prefill.target(committed, [0] * 4)
    clean, poisoned = WindowRunner(graphs[WINDOW], 4), WindowRunner(graphs[WINDOW], 4)
    clean.caches, poisoned.caches = prefill.caches, {name: cache.copy() for name, cache in prefill.caches.items()}
    for _ in range(5):
        starts = [len(tokens) for tokens in committed]
        chunks = [random_tokens(1 + int(rng.integers(0, WINDOW)), int(rng.integers(1 << 30))) for _ in committed]
        poisoned.poison(starts, seed)
        outputs, again = clean.target(chunks, starts), poisoned.target(chunks, starts)
        check_rows(target, outputs, [c + k for c, k in zip(committed, chunks, strict=True)], [len(c) for c in chunks])
        for name, output in outputs.items():
            np.testing.assert_array_equal(again[name], output)
        accepted = [int(rng.integers(1, len(chunk) + 1)) for chunk in chunks]
        committed = [c + k[:m] for c, k, m in zip(committed, chunks, accepted, strict=True)]


def test_rows_of_no_request_and_idle_requests_change_nothing(
    target: TinyTarget, graphs: dict[int | None, Path]
) -> None:
    prompts = [random_tokens(count, count) for count in (6, 4, 7)]
    runner = WindowRunner(graphs[WINDOW], 3)
    runner.target(prompts, [0, 0, 0])
    outputs = runner.target([[3], [], [1, 2]], [6, 4, 7], padding=5)  # request 1 is idle, 5 rows fill up a bucket
    assert outputs["features"].shape[0] == 8
    check_rows(target, outputs, [[*prompts[0], 3], [*prompts[2], 1, 2]], [1, 2])
    outputs = runner.target([[3], [5], [2]], [7, 4, 9])
    check_rows(target, outputs, [[*prompts[0], 3, 3], [*prompts[1], 5], [*prompts[2], 1, 2, 2]], [1, 1, 1])


def test_only_wanted_rows_meet_the_vocabulary(target: TinyTarget, graphs: dict[int | None, Path]) -> None:
    tokens = random_tokens(7, 5)
    feeds = {
        "token_ids": i32(tokens),
        "positions": i32(range(7)),
        "request_rows": i32([0] * 7),
        "depths": i32(range(7)),
        "subsequence_begins": i32([0, 7]),
        "write_indices": i32([0]),
        "head_rows": i32([6, 2]),
    }
    logits, _ = target.reference(tokens)
    outputs = WindowRunner(graphs[WINDOW], 1).run({**feeds, "logit_rows": i32([1])})
    np.testing.assert_array_equal(outputs["argmax"], logits[[6, 2]].argmax(-1))
    np.testing.assert_allclose(outputs["logits"], logits[[2]], atol=TOLERANCE)
    assert WindowRunner(graphs[WINDOW], 1).run({**feeds, "logit_rows": i32([])})["logits"].shape == (0, 97)
