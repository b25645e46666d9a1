"""Acceptance as decoding would see it."""

from __future__ import annotations

import numpy as np

from dcut_engines.train.evaluate import accepted_lengths, decoding_steps


def test_only_the_drafts_before_the_first_wrong_one_count() -> None:
    match = np.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    assert accepted_lengths(match).tolist() == [2, 0, 4, 0]


def test_decoding_jumps_over_what_it_accepts() -> None:
    #              anchor 0 -> 3 -> 4 -> 6 (the last response token has no block behind it)
    assert decoding_steps([2, 7, 7, 0, 1, 9, 0]) == [2, 0, 1, 0]
    assert decoding_steps([3, 0]) == [3]
    assert decoding_steps([]) == []
