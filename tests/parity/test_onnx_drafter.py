"""The ONNX drafter under ONNX Runtime, in fp32, against the dense torch reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dflash_reference import TinyDrafter, draft_block, tiny_drafter
from window_runner import WindowRunner

from dcut_engines.emit_onnx import emit_drafter
from dcut_engines.model_config import RopeConfig

TOLERANCE = 1e-4  # absolute, on probabilities, fp32 on both sides
MAX_LEN = 96
YARN = RopeConfig(theta=10000.0, kind="yarn", factor=4.0, original_max_position=128)
DRAFT_VOCAB = np.array([0, 2, 3, 5, 8, 13, 21, 22, 34, 40, 55, 60], np.int32)


def emit(drafter: TinyDrafter, draft_vocab: np.ndarray | None, path: Path) -> None:
    head = drafter.head if draft_vocab is None else drafter.head[draft_vocab]
    emit_drafter(
        *(drafter.config, drafter.weights, drafter.embedding, head, draft_vocab, "fp32", 128, path), max_len=MAX_LEN
    )


def check_blocks(
    drafter: TinyDrafter,
    draft_vocab: np.ndarray | None,
    outputs: dict[str, np.ndarray],
    contexts: list[np.ndarray],
    anchors: list[int],
) -> None:
    borrowed = (drafter.config, drafter.weights, drafter.embedding, drafter.head, draft_vocab)
    for row, (context, anchor) in enumerate(zip(contexts, anchors, strict=True)):
        expected = draft_block(context, anchor, *borrowed)
        np.testing.assert_array_equal(outputs["tokens"][row], expected.tokens)
        np.testing.assert_allclose(outputs["confidence"][row], expected.confidence, atol=TOLERANCE)


@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB], ids=["whole-vocabulary", "draft-vocabulary"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_blocks_over_growing_ragged_contexts(tmp_path: Path, causal: bool, draft_vocab: np.ndarray | None) -> None:
    """Steps append what was accepted; slots past each request's context are noise in one run, and change no bit."""
    drafter = tiny_drafter(causal=causal, attention_bias=causal, rope=YARN, seed=4)
    emit(drafter, draft_vocab, tmp_path / "drafter.onnx")
    clean, poisoned = (WindowRunner(tmp_path / "drafter.onnx", 3) for _ in range(2))
    rng = np.random.default_rng(7)
    features = [drafter.random_features(MAX_LEN, seed) for seed in range(3)]
    done, new = [0, 0, 0], [11, 1, 25]
    for _ in range(6):
        ends = [start + count for start, count in zip(done, new, strict=True)]
        fresh = [rows[start:end] for rows, start, end in zip(features, done, ends, strict=True)]
        anchors = [int(anchor) for anchor in rng.integers(0, drafter.config.vocab_size, 3)]
        poisoned.poison(done, seed=1)
        outputs, again = (
            runner.drafter(fresh, anchors, done, drafter.config.block_size) for runner in (clean, poisoned)
        )
        check_blocks(
            drafter, draft_vocab, outputs, [rows[:end] for rows, end in zip(features, ends, strict=True)], anchors
        )
        for name, output in outputs.items():
            np.testing.assert_array_equal(again[name], output)
        done, new = ends, [int(count) for count in rng.integers(0, drafter.config.block_size + 1, 3)]
        new[0] = max(new[0], 1)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_context_in_chunks_is_context_at_once(tmp_path: Path, causal: bool) -> None:
    drafter = tiny_drafter(causal=causal, block_size=8, layers=3, kv_heads=1, seed=5)
    emit(drafter, None, tmp_path / "drafter.onnx")
    runner = WindowRunner(tmp_path / "drafter.onnx", 1)
    features = drafter.random_features(40, 9)
    for start, end in ((0, 16), (16, 19), (19, 40)):
        outputs = runner.drafter([features[start:end]], [17], [start], 8)
        check_blocks(drafter, None, outputs, [features[:end]], [17])


def test_a_head_that_is_the_embedding_is_stored_once(tmp_path: Path) -> None:
    drafter = tiny_drafter(causal=True, seed=6)
    tied = TinyDrafter(drafter.config, drafter.weights, drafter.embedding, drafter.embedding)
    emit(drafter, None, tmp_path / "untied.onnx")
    emit(tied, None, tmp_path / "tied.onnx")
    sizes = [(tmp_path / f"{name}.onnx.data").stat().st_size for name in ("untied", "tied")]
    assert sizes[0] - sizes[1] >= drafter.head.nbytes
    features = drafter.random_features(5, 1)
    outputs = WindowRunner(tmp_path / "tied.onnx", 1).drafter([features], [3], [0], 4)
    check_blocks(tied, None, outputs, [features], [3])
