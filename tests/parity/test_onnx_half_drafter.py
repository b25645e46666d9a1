"""The ONNX drafter in fp16, the pack node at its tail, under ONNX Runtime against torch and the node's reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dflash_reference import FloatArray, TinyDrafter, draft_block, tiny_drafter
from numpy.typing import NDArray
from tiny_targets import TinyTarget
from window_runner import Arrays, WindowRunner, i32

from dcut_engines.drafter_checkpoint import load_drafter
from dcut_engines.emit_onnx import emit_drafter
from dcut_engines.sources import resolve_drafter
from dcut_engines.tensorrt_graph import append_pack
from dcut_plugins.confidence_topk_pack.contract import OUTPUTS, Packed, PackInputs
from dcut_plugins.confidence_topk_pack.reference import confidence_topk_pack, disagreement
from dcut_trt.spec.packing import budget

CONFIDENCE_TOLERANCE = 1e-2  # absolute; seen: 3e-3
NEAR_TIE = 2e-3  # of the two best draft logits, relative to the largest of the row: either may be drafted
PACK_NEAR_TIE = 1e-2  # of scores and of utilities, as in disagreement()
MAX_LEN, BATCH, STEPS = 96, 4, 12
RATIOS = (0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_a_tiny_drafter_packs_what_the_references_pack(tmp_path: Path, causal: bool) -> None:
    drafter = tiny_drafter(causal=causal, block_size=8, seed=4)
    features = [drafter.random_features(MAX_LEN, seed) for seed in range(BATCH)]
    check_steps(drafter, None, features, tmp_path / "drafter.onnx")


def test_the_shipped_drafter_packs_what_the_references_pack(tmp_path: Path, smollm2_target: TinyTarget) -> None:
    checkpoint = load_drafter(resolve_drafter("smollm2-135m-dflash-b8"))
    embedding = smollm2_target.weights["model.embed_tokens.weight"]
    weights = {name: checkpoint.weights[name] for name in checkpoint.weights}
    drafter = TinyDrafter(checkpoint.config, weights, embedding, embedding)
    tokens = np.random.default_rng(8).integers(smollm2_target.config.vocab_size, size=(BATCH, 72)).tolist()
    features = [smollm2_target.features(row, checkpoint.config.target_layer_ids) for row in tokens]
    assert checkpoint.draft_vocab is not None
    check_steps(drafter, i32(checkpoint.draft_vocab), features, tmp_path / "drafter.onnx")


def check_steps(
    drafter: TinyDrafter, draft_vocab: NDArray[np.int32] | None, features: list[FloatArray], path: Path
) -> None:
    """Steps over growing ragged contexts, with costs that let every bucket win now and then."""
    config = drafter.config
    head = drafter.head if draft_vocab is None else drafter.head[draft_vocab]
    arrays = (config, drafter.weights, drafter.embedding, head, draft_vocab)
    emit_drafter(*arrays, "fp16", MAX_LEN, path, max_len=MAX_LEN)
    append_pack(path, len(RATIOS), BATCH)
    runner, rng = WindowRunner(path, BATCH), np.random.default_rng(7)
    done, new = [0] * BATCH, [11, 1, 25, 4]
    equal, buckets = 0, set()
    for _ in range(STEPS):
        ends = [start + count for start, count in zip(done, new, strict=True)]
        fresh = [rows[start:end] for rows, start, end in zip(features, done, ends, strict=True)]
        anchors = [int(anchor) for anchor in rng.integers(0, config.vocab_size, BATCH)]
        pack = pack_inputs(rng, ends, config.block_size)
        outputs = runner.drafter(fresh, anchors, done, config.block_size, pack)
        contexts = [rows[:end] for rows, end in zip(features, ends, strict=True)]
        expected = expected_inputs(drafter, draft_vocab, outputs, contexts, anchors) | {"anchors": i32(anchors), **pack}
        packed = Packed(*(outputs[name] for name in OUTPUTS))
        assert disagreement(PackInputs(**expected), packed, PACK_NEAR_TIE) is None
        assert disagreement(PackInputs(**expected | {"confidence": outputs["confidence"]}), packed) is None
        equal += np.array_equal(confidence_topk_pack(PackInputs(**expected)).keep, packed.keep)
        buckets.add(int(packed.bucket[0]))
        done, new = ends, [int(count) for count in rng.integers(1, 4, BATCH)]
    assert equal >= 0.8 * STEPS  # near-ties are the exception
    assert len(buckets) >= 3


def pack_inputs(rng: np.random.Generator, positions: list[int], block_size: int) -> Arrays:
    """What the pack node takes besides the drafter's tokens, confidence and anchors."""
    slope = rng.choice([0.01, 0.1, 0.3])
    return {
        "anchor_positions": i32(positions),
        "budgets": i32([budget(ratio, BATCH, block_size) for ratio in RATIOS]),
        "cost_ms": (1 + np.cumsum(rng.uniform(0, slope, len(RATIOS)))).astype(np.float32),
        "bypass": i32([0]),
    }


def expected_inputs(
    drafter: TinyDrafter,
    draft_vocab: NDArray[np.int32] | None,
    outputs: Arrays,
    contexts: list[FloatArray],
    anchors: list[int],
) -> Arrays:
    """tokens and confidence by the torch reference, which the outputs are checked against."""
    borrowed = (drafter.config, drafter.weights, drafter.embedding, drafter.head, draft_vocab)
    drafts = [draft_block(context, anchor, *borrowed) for context, anchor in zip(contexts, anchors, strict=True)]
    tokens, logits = i32([draft.tokens for draft in drafts]), np.stack([draft.logits for draft in drafts])
    second, best = np.moveaxis(np.partition(logits, -2)[..., -2:], -1, 0)
    clear = best - second >= NEAR_TIE * np.abs(logits).max(-1)
    np.testing.assert_array_equal(outputs["tokens"][clear], tokens[clear])
    confidence = np.stack([draft.confidence for draft in drafts])
    np.testing.assert_allclose(outputs["confidence"], confidence, rtol=0, atol=CONFIDENCE_TOLERANCE)
    return {"tokens": np.where(clear, tokens, outputs["tokens"]), "confidence": confidence}
