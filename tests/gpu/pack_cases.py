"""Inputs for every twin of ConfidenceTopKPack: random ones, and ones whose right answer is exact on any machine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dcut_plugins.confidence_topk_pack.contract import PackInputs
from dcut_trt.spec.packing import budget
from dcut_trt.types import FloatArray, IntArray

RATIOS = (0.25, 0.5, 0.75, 1.0)
SHAPES = ((1, 1), (1, 7), (1, 15), (3, 4), (5, 15), (8, 7), (16, 15), (33, 7), (64, 7), (64, 15))  # B, D
LARGEST = ((256, 15), (512, 7), (2048, 1), (1, 4095))  # B * (D + 1) = 4096
AWKWARD = np.array([0, 1, 0.5, 0.25, 1e-45, 1.1754944e-38, 1 - 2**-24, np.nan, -1, 2, np.inf, -np.inf], np.float32)
EXACT = np.array([0, 1, 0.5, 0.5, 0.25, np.nan, -1, 2], np.float32)  # sums of their logarithms are the same everywhere
BAD_COSTS = np.array([0, -1, np.nan, np.inf, -np.inf], np.float32)


def random_case(rng: np.random.Generator, shape: tuple[int, int] | None = None) -> PackInputs:
    """Any confidences, budgets and costs; one in twenty is bypassed, one in ten has costs that rule buckets out."""
    batch, length = shape or SHAPES[rng.integers(len(SHAPES))]
    confidence = rng.random((batch, length), np.float32) ** np.float32(rng.choice([0.1, 0.5, 1, 4]))
    if rng.random() < 0.3:
        awkward = rng.random(confidence.shape) < 0.3
        confidence[awkward] = rng.choice(AWKWARD, int(awkward.sum()))
    costs = np.sort(rng.uniform(1, 20, 4)).astype(np.float32)
    if rng.random() < 0.1:
        ruled_out = rng.random(4) < 0.6
        costs[ruled_out] = rng.choice(BAD_COSTS, int(ruled_out.sum()))
    budgets = ratio_budgets(batch, length)
    if rng.random() < 0.2:
        budgets = rng.integers(-5, batch * (length + 1) + 5, 4).astype(np.int32)
    return make_case(confidence, budgets, costs, bypass=int(rng.random() < 0.05), seed=int(rng.integers(1 << 30)))


def exact_cases() -> Iterator[tuple[str, PackInputs]]:
    """Cases on which every twin must give the reference's answer to the last integer."""
    for batch, length in (*SHAPES, *LARGEST):
        rng = np.random.default_rng(batch * 5000 + length)
        shape, budgets = (batch, length), ratio_budgets(batch, length)
        costs = np.array([3, 5, 7, 8], np.float32)
        whole = {"ones": 1.0, "zeros": 0.0, "NaN": np.nan, "halves": 0.5}
        for name, value in whole.items():
            yield f"{shape} {name}", make_case(np.full(shape, value, np.float32), budgets, costs)
        mixed = rng.choice(EXACT, shape)
        yield f"{shape} mixed", make_case(mixed, budgets, costs)
        yield f"{shape} bypassed", make_case(mixed, budgets, costs, bypass=1)
        yield f"{shape} bypassed by any value", make_case(mixed, budgets, costs, bypass=-7)
        yield f"{shape} one budget", make_case(mixed, budgets[1:2], costs[1:2])
        yield f"{shape} budgets out of range", make_case(mixed, np.array([-9, 1 << 30], np.int32), costs[:2])
        yield f"{shape} many budgets", make_case(mixed, np.resize(budgets, 32), np.linspace(9, 2, 32, dtype=np.float32))
        yield f"{shape} no usable cost", make_case(mixed, budgets, np.resize(BAD_COSTS, 4))
        yield f"{shape} one usable cost", make_case(mixed, budgets, np.array([0, np.nan, 9, np.inf], np.float32))
        yield f"{shape} equal utilities", make_case(np.zeros(shape, np.float32), budgets, np.ones(4, np.float32))


def make_case(
    confidence: FloatArray, budgets: IntArray, costs: FloatArray, *, bypass: int = 0, seed: int = 0
) -> PackInputs:
    """These confidences with distinct ids and positions, so that a wrong row cannot pass for a right one."""
    batch, length = confidence.shape
    rng = np.random.default_rng(seed)
    ids = rng.permutation(batch * (length + 1)).astype(np.int32) + 1
    positions = rng.permutation(batch).astype(np.int32) * 10_000 + 1
    tokens = ids[batch:].reshape(batch, length)
    return PackInputs(tokens, confidence, ids[:batch], positions, budgets, costs, np.array([bypass], np.int32))


def ratio_budgets(batch: int, length: int) -> IntArray:
    return np.array([budget(ratio, batch, length + 1) for ratio in RATIOS], np.int32)
