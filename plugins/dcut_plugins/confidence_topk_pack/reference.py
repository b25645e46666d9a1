"""The contract in numpy, on the selector that serves on CPU, and the rule by which another twin agrees with it."""

from __future__ import annotations

import numpy as np

from dcut_plugins.confidence_topk_pack.contract import OUTPUTS, Packed, PackInputs
from dcut_trt.spec.packing import pack
from dcut_trt.spec.selector import keep_depths, prefix_log_scores, rank
from dcut_trt.types import FloatArray, IntArray

# logf and expf of numpy, glibc, ONNX Runtime and CUDA differ in the last bits, and D of them add up.
NEAR_TIE = 1e-5


def confidence_topk_pack(inputs: PackInputs) -> Packed:
    """What the node computes for these inputs."""
    log_scores = prefix_log_scores(inputs.confidence)
    ranked = rank(log_scores)
    budgets, utilities = _utilities(inputs, log_scores, ranked)
    if inputs.bypass[0]:
        bucket, size = len(budgets), len(inputs.anchors)
    else:
        bucket = int(np.argmax(utilities)) if utilities.any() else len(budgets) - 1
        size = int(budgets[bucket])
    return _packed(inputs, bucket, keep_depths(ranked, size, len(inputs.anchors)))


def disagreement(inputs: PackInputs, got: Packed, near_tie: float = NEAR_TIE) -> str | None:
    """Why `got` is not an answer to `inputs`, or None.

    Where the reference's own choice hangs on a near-tie, the other choice is as good: a bucket whose utility is within
    a relative near_tie of the best, and kept drafts whose scores are within near_tie * max(1, |score|) of those
    dropped. All that follows from the choice must then be exact.
    """
    log_scores = prefix_log_scores(inputs.confidence)
    budgets, utilities = _utilities(inputs, log_scores, rank(log_scores))
    bucket, keep = int(got.bucket[0]), got.keep
    batch, block = log_scores.shape
    if bucket not in _good_buckets(inputs, utilities, near_tie):
        return f"bucket {bucket} of utilities {utilities.tolist()}, bypass {inputs.bypass.tolist()}"
    size = batch if inputs.bypass[0] else int(budgets[bucket])
    if keep.min() < 0 or keep.max() >= block or (keep + 1).sum() != size:
        return f"keep {keep.tolist()} does not fill {size} rows"
    kept = np.arange(block) <= keep[:, None]  # [B, D + 1]
    least_kept, best_dropped = log_scores[kept].min(), log_scores[~kept].max(initial=-np.inf)
    if best_dropped > -np.inf and not least_kept >= best_dropped - near_tie * max(1.0, -float(best_dropped)):
        return f"kept a score of {least_kept} and dropped one of {best_dropped}"
    return _first_difference(got, _packed(inputs, bucket, keep))


def _good_buckets(inputs: PackInputs, utilities: FloatArray, near_tie: float) -> list[int]:
    """The right one, and those in a near-tie with it."""
    if inputs.bypass[0]:
        return [len(utilities)]
    if not utilities.any():
        return [len(utilities) - 1]
    return [index for index, utility in enumerate(utilities) if utility >= utilities.max() * (1 - near_tie)]


def _utilities(inputs: PackInputs, log_scores: FloatArray, ranked: IntArray) -> tuple[IntArray, FloatArray]:
    """budgets [R] within their range, and expected tokens per millisecond [R], 0 for a bucket that is ruled out."""
    budgets = np.clip(inputs.budgets, len(log_scores), log_scores.size)
    expected = np.cumsum(np.exp(log_scores.T.ravel()[ranked]), dtype=np.float64)[budgets - 1]
    usable = np.isfinite(inputs.cost_ms) & (inputs.cost_ms > 0)
    return budgets, np.divide(expected, inputs.cost_ms, out=np.zeros(len(budgets)), where=usable)


def _packed(inputs: PackInputs, bucket: int, keep: IntArray) -> Packed:
    plan = pack(inputs.anchors, inputs.tokens, keep)
    positions = inputs.anchor_positions[plan.request_rows] + plan.depths
    batch, length = inputs.tokens.shape
    rows = np.zeros((4, batch * (length + 1)), np.int32)
    rows[:, : plan.size] = plan.token_ids, plan.request_rows, plan.depths, positions
    return Packed(np.array([bucket], np.int32), keep, plan.cu_lens, *rows)


def _first_difference(got: Packed, expected: Packed) -> str | None:
    for name in OUTPUTS:
        ours, theirs = getattr(expected, name), getattr(got, name)
        if theirs.shape != ours.shape or theirs.dtype != np.int32 or not np.array_equal(ours, theirs):
            return f"{name}: expected {ours.tolist()}, got {theirs.dtype} {theirs.tolist()}"
    return None
