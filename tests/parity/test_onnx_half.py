"""The ONNX target in fp16, as TensorRT compiles it, under ONNX Runtime against Hugging Face transformers in fp32.

ONNX Runtime rounds to fp16 between nodes and computes in fp32 inside most: so this is the loss of the stored precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_targets import FloatArray, TinyTarget, tiny_llama, tiny_qwen3
from window_runner import Arrays, WindowRunner

from dcut_engines.emit_onnx import emit_target
from dcut_engines.tensorrt_profiles import FEWEST_ROWS
from dcut_trt.spec.packing import budget

# Both relative to the largest absolute value of the reference in that row. Seen: errors of 9e-3 in the logits of the
# tiny targets and 7e-3 in those of SmolLM2, and another argmax where the two best were 8e-4 apart. SmolLM2's late
# layers reach 26,000, which fp16 holds; their squares would not fit, and a norm must sum them in fp32.
TOLERANCE = 1e-2  # of logits and features
NEAR_TIE = 2e-3  # the reference's two best logits are closer than this: either may be the argmax

MAX_LEN = 80
POSITIONS = 128  # ONNX Runtime takes no more rows per call than the rotary table has
BLOCK = 8
RATIOS = (0.25, 0.5, 0.75, 1.0)
REQUESTS, LENGTH = 4, 64


@dataclass(frozen=True, slots=True)
class Half:
    """A target's fp16 graph, and what the reference says about whole sequences: logits and features by row."""

    runner: WindowRunner
    sequences: list[list[int]]
    logits: list[FloatArray]
    features: list[FloatArray]

    def check(self, outputs: Arrays, past: Sequence[int], ends: Sequence[int]) -> None:
        """The packed outputs are those of tokens past[b] .. ends[b] - 1 of sequence b."""
        spans = [slice(start, end) for start, end in zip(past, ends, strict=True)]
        expected = np.concatenate([rows[span] for rows, span in zip(self.logits, spans, strict=False)])
        features = np.concatenate([rows[span] for rows, span in zip(self.features, spans, strict=False)])
        assert relative_error(outputs["logits"], expected) < TOLERANCE
        assert relative_error(outputs["features"][: len(features)], features) < TOLERANCE
        clear = clear_rows(expected)
        np.testing.assert_array_equal(outputs["argmax"][clear], expected.argmax(-1)[clear])


def clear_rows(logits: FloatArray) -> NDArray[np.bool_]:
    """Which rows have no near-tie."""
    second, best = np.partition(logits, -2)[:, -2:].T
    clear: NDArray[np.bool_] = best - second >= NEAR_TIE * np.abs(logits).max(-1)
    return clear


def relative_error(actual: FloatArray, expected: FloatArray) -> float:
    """The largest over all rows."""
    return float((np.abs(actual - expected).max(-1) / np.abs(expected).max(-1)).max())


TARGETS = {"llama3": (tiny_llama, (0, 2)), "qwen3": (tiny_qwen3, (0, 2))}


@pytest.fixture(scope="module", params=[*TARGETS, "smollm2"])
def half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Half:
    if request.param == "smollm2":
        target, layers = request.getfixturevalue("smollm2_target"), (1, 14, 27)
    else:
        make, layers = TARGETS[request.param]
        target = make()
    path = tmp_path_factory.mktemp("half") / "target.onnx"
    emit_target(target.config, target.weights, layers, "fp16", POSITIONS, path, max_len=MAX_LEN, window=None)
    return Half(WindowRunner(path, REQUESTS), *references(target, layers))


def references(
    target: TinyTarget, layers: tuple[int, ...]
) -> tuple[list[list[int]], list[FloatArray], list[FloatArray]]:
    """Random sequences, and the reference's logits [n, V] and features [n, F] of each."""
    rng = np.random.default_rng(3)
    sequences = rng.integers(target.config.vocab_size, size=(REQUESTS, LENGTH)).tolist()
    found = [target.reference(tokens) for tokens in sequences]
    features = [np.concatenate([after[layer] for layer in layers], axis=1) for _, after in found]
    return sequences, [logits for logits, _ in found], features


def test_near_ties_are_the_exception(half: Half) -> None:
    assert clear_rows(np.concatenate(half.logits)).mean() > 0.85


def test_prefill_in_chunks_and_decode(half: Half) -> None:
    runner, past = half.runner.anew(REQUESTS), [0] * REQUESTS
    for counts in ([33, 17, 30, 1], [9, 8, 2, 20], [1] * 4, [1] * 4, [1] * 4):
        ends = [start + count for start, count in zip(past, counts, strict=True)]
        chunks = [tokens[p:e] for tokens, p, e in zip(half.sequences, past, ends, strict=True)]
        half.check(runner.target(chunks, past), past, ends)
        past = ends


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_verification_at_every_token_bucket(half: Half, batch: int) -> None:
    """All rows of a bucket in use, and half of those beyond the anchors left to nobody."""
    rng = np.random.default_rng(batch)
    runner, sequences = half.runner.anew(batch), half.sequences[:batch]
    past = [int(count) for count in rng.integers(1, 16, batch)]
    prompts = [tokens[:count] for tokens, count in zip(sequences, past, strict=True)]
    half.check(runner.target(prompts, [0] * batch), [0] * batch, past)
    for ratio in RATIOS:
        rows = max(budget(ratio, batch, BLOCK), FEWEST_ROWS)
        for padding in sorted({0, (rows - batch) // 2}):
            lengths = ragged_lengths(rng, batch, rows - padding)
            ends = [start + count for start, count in zip(past, lengths, strict=True)]
            chunks = [tokens[p:e] for tokens, p, e in zip(sequences, past, ends, strict=True)]
            outputs = runner.target(chunks, past, padding, window=BLOCK)
            assert len(outputs["features"]) == rows
            half.check(outputs, past, ends)
            past = [start + int(rng.integers(1, min(count, 3) + 1)) for start, count in zip(past, lengths, strict=True)]


def ragged_lengths(rng: np.random.Generator, batch: int, rows: int) -> list[int]:
    """1 to BLOCK rows for each request, `rows` in all."""
    places = rng.permutation(np.repeat(np.arange(batch), BLOCK - 1))[: rows - batch]
    return [1 + int(count) for count in np.bincount(places, minlength=batch)]
