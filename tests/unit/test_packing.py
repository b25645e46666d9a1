"""Budgets per ratio, captured shapes, and the packed layout, against naive twins."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_trt.spec.packing import budget, captured_batches, pack, token_buckets
from dcut_trt.types import IntArray


@pytest.mark.parametrize("ratio", ["0.05", "0.1", "0.25", "0.3", "0.5", "0.7", "0.75", "0.9", "1.0"])
def test_budget_is_the_ceiling_of_the_exact_product_and_at_least_one_row_each(ratio: str) -> None:
    for batch, block in itertools.product(range(1, 65), range(2, 18)):
        exact = math.ceil(Fraction(ratio) * batch * block)
        assert budget(float(ratio), batch, block) == max(batch, exact)


def test_budget_at_the_edges() -> None:
    assert budget(1.0, 8, 16) == 128
    assert budget(0.25, 1, 8) == 2
    assert budget(0.26, 1, 8) == 3
    assert budget(0.001, 8, 16) == 8


def test_token_buckets_merge_equal_sizes() -> None:
    assert token_buckets((0.25, 0.5, 1.0), (1, 2, 4), 8) == (2, 4, 8, 16, 32)


@pytest.mark.parametrize(
    ("max_batch", "expected"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (32, (1, 2, 4, 8, 16, 32))]
)
def test_captured_batches_are_powers_of_two_and_the_largest(max_batch: int, expected: tuple[int, ...]) -> None:
    assert captured_batches(max_batch) == expected


def test_the_layout_of_the_docstring() -> None:
    anchors = np.array([10, 20, 30], np.int32)
    tokens = np.array([[11, 12, 13], [21, 22, 23], [31, 32, 33]], np.int32)
    plan = pack(anchors, tokens, np.array([2, 0, 2], np.int32), 0.5)
    assert plan.size == 7
    assert plan.token_ids.tolist() == [10, 11, 12, 20, 30, 31, 32]
    assert plan.request_rows.tolist() == [0, 0, 0, 1, 2, 2, 2]
    assert plan.depths.tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert plan.cu_lens.tolist() == [0, 3, 4, 7]
    assert plan.keep.tolist() == [2, 0, 2]
    assert plan.ratio == 0.5
    assert [plan.drafts_of(row) for row in range(3)] == [[11, 12], [], [31, 32]]


@given(st.integers(0, 6).flatmap(lambda length: st.lists(st.integers(0, length), min_size=1, max_size=9)))
def test_pack_equals_appending_row_by_row(keep: list[int]) -> None:
    batch, length = len(keep), max(keep)
    anchors: IntArray = np.arange(batch, dtype=np.int32) * 100
    tokens: IntArray = anchors[:, None] + np.arange(1, length + 1, dtype=np.int32)  # [B, D]
    rows = [(anchor + depth, row, depth) for row, anchor in enumerate(anchors) for depth in range(keep[row] + 1)]

    plan = pack(anchors, tokens, np.array(keep, np.int32))

    assert list(zip(plan.token_ids, plan.request_rows, plan.depths, strict=True)) == rows
    assert plan.size == len(rows)
    assert plan.cu_lens.tolist() == [sum(n + 1 for n in keep[:row]) for row in range(batch + 1)]
    for array in (plan.token_ids, plan.request_rows, plan.depths, plan.cu_lens):
        assert array.dtype == np.int32
