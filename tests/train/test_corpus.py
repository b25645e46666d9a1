"""Training text on disk: what is read, refused, cut, held out and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcut_engines.train.corpus import (
    Corpus,
    cut,
    frequent_ids,
    held_out,
    make_corpus,
    read_corpus,
    response_counts,
)
from dcut_trt.errors import UnknownModel

GOOD = {"tokens": np.arange(6), "lengths": np.array([4, 2]), "response_start": np.array([2, 1])}


@pytest.mark.parametrize("largest", [9, 70_000])
def test_a_corpus_reads_as_it_was_saved(tmp_path: Path, largest: int) -> None:
    corpus = make_corpus([[1, 2, largest], [4, 5]], [1, 1])
    corpus.save(tmp_path / "text.npz")
    read = read_corpus(tmp_path / "text.npz", largest + 1)
    assert [read.sequence(0).tolist(), read.sequence(1).tolist()] == [[1, 2, largest], [4, 5]]
    assert (read.response_start.tolist(), read.response_tokens, read.sha256) == ([1, 1], 3, corpus.sha256)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": None}, "array lengths is missing"),
        ({"tokens": np.ones(6)}, "tokens is float64"),
        ({"lengths": np.array([4, 3])}, "do not divide 6 tokens"),
        ({"response_start": np.array([2])}, "1 response starts"),
        ({"tokens": np.array([0, 1, 2, 3, 4, 10])}, "token id 10 is not in [0, 10)"),
        ({"response_start": np.array([2, 3])}, "response_start lies outside"),
        ({"response_start": np.array([0, 1])}, "response_start lies outside"),
    ],
)
def test_broken_data_is_refused_by_file_and_array(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    arrays = {name: array for name, array in {**GOOD, **changed}.items() if array is not None}
    np.savez(tmp_path / "text.npz", **arrays)
    with pytest.raises(UnknownModel) as caught:
        read_corpus(tmp_path / "text.npz", 10)
    assert message in str(caught.value)
    assert "text.npz" in str(caught.value)


def test_a_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(UnknownModel, match="cannot be read"):
        read_corpus(tmp_path / "text.npz", 10)


def test_sequences_are_cut_and_those_without_a_label_dropped() -> None:
    corpus = make_corpus([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], [1, 2]], [2, 4, 1])
    kept = cut(corpus, 5)
    assert [kept.sequence(index).tolist() for index in range(len(kept))] == [[1, 2, 3, 4, 5]]
    assert len(cut(corpus, 2)) == 0


def test_held_out_sequences_stay_held_out_when_data_is_added() -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 50, 12).tolist() for _ in range(400)]
    every = held_out(corpus_of(sequences), 0.1)
    assert 20 <= every.sum() <= 60
    np.testing.assert_array_equal(held_out(corpus_of(sequences[200:]), 0.1), every[200:])
    np.testing.assert_array_equal(held_out(corpus_of([*sequences, *sequences]), 0.1), np.tile(every, 2))


def test_only_responses_are_counted() -> None:
    counts = response_counts([make_corpus([[7, 7, 1, 2, 2], [3, 3, 2]], [2, 2])], 8)
    assert counts.tolist() == [0, 1, 3, 0, 0, 0, 0, 0]
    assert frequent_ids(counts, 3) == (0, 1, 2)


def corpus_of(sequences: list[list[int]]) -> Corpus:
    return make_corpus(sequences, [3] * len(sequences))
