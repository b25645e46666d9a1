"""Measures of a score against twins that try every pair."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dcut_server.simulate.quality import auroc, expected_calibration_error, mid_ranks, spearman, tokens_verified
from dcut_trt.spec.selector import prefix_log_scores

coarse = st.integers(0, 5).map(lambda value: value / 5)  # so that values meet
judged = st.integers(2, 20).flatmap(
    lambda count: st.tuples(arrays(np.float64, count, elements=coarse), arrays(np.bool_, count))
)


@given(judged)
def test_auroc_equals_trying_every_pair(drafts: tuple[np.ndarray, np.ndarray]) -> None:
    scores, accepted = drafts
    pairs = list(itertools.product(scores[accepted], scores[~accepted]))
    if not pairs:
        assert np.isnan(auroc(scores, accepted))
        return
    assert auroc(scores, accepted) == pytest.approx(np.mean([(a > b) + 0.5 * (a == b) for a, b in pairs]))


def test_auroc_takes_minus_infinity_as_the_lowest() -> None:
    assert auroc(np.array([-np.inf, -np.inf, -1.0, 0.0]), np.array([False, False, True, True])) == 1.0


@given(arrays(np.float64, st.integers(1, 20), elements=coarse))
def test_mid_ranks_equal_counting(values: np.ndarray) -> None:
    counted = [(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values]
    assert mid_ranks(values).tolist() == counted


@given(judged, st.randoms(use_true_random=False))
def test_spearman_equals_pearson_of_the_ranks(drafts: tuple[np.ndarray, np.ndarray], shuffler: object) -> None:
    first = drafts[0]
    second = first.copy()
    shuffler.shuffle(second)  # type: ignore[attr-defined]
    if np.ptp(first) == 0:
        assert np.isnan(spearman(first, second))
        return
    expected = np.corrcoef(mid_ranks(first), mid_ranks(second))[0, 1]
    assert spearman(first, second) == pytest.approx(expected)
    assert spearman(first, np.exp(first)) == pytest.approx(1)
    assert spearman(first, -first) == pytest.approx(-1)


@given(judged)
def test_calibration_error_equals_summing_bin_by_bin(drafts: tuple[np.ndarray, np.ndarray]) -> None:
    probability, accepted = drafts
    error = 0.0
    for low in range(4):
        inside = (probability * 4 >= low) & ((probability * 4 < low + 1) | (low == 3))
        if inside.any():
            error += inside.mean() * abs(probability[inside].mean() - accepted[inside].mean())
    assert expected_calibration_error(probability, accepted, bins=4) == pytest.approx(error)


shapes = st.tuples(st.integers(1, 5), st.integers(1, 4))


@given(shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=st.floats(0.125, 0.875, width=32))), st.data())
def test_tokens_verified_equals_taking_the_best_positions_one_by_one(
    confidence: np.ndarray, data: st.DataObject
) -> None:
    batch, length = confidence.shape
    accepted = np.array(data.draw(st.lists(st.integers(0, length), min_size=batch, max_size=batch)), np.int32)
    size = data.draw(st.integers(batch, batch * (length + 1)))
    scores = prefix_log_scores(confidence)
    places = [(scores[row, depth], -depth, -row) for row in range(batch) for depth in range(length + 1)]
    kept = [(-row, -depth) for _, depth, row in heapq.nlargest(size, places)]
    assert tokens_verified(scores, accepted, size) == sum(depth <= accepted[row] for row, depth in kept)
