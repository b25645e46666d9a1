"""Training text as the target wrote it: token sequences, where each response begins, and what is held out."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcut_trt.errors import UnknownModel

ARRAYS = ("tokens", "lengths", "response_start")
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """tokens: all sequences one after the other.  lengths, response_start: [sequences].

    response_start is counted within its sequence: 1 <= response_start <= length.
    """

    tokens: NDArray[np.uint32]
    lengths: IntArray
    response_start: IntArray

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> IntArray:
        """Where each sequence begins in tokens."""
        starts: IntArray = np.cumsum(self.lengths) - self.lengths
        return starts

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for part in (self.tokens, self.lengths, self.response_start):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    @property
    def response_tokens(self) -> int:
        return int((self.lengths - self.response_start).sum())

    def sequence(self, index: int) -> NDArray[np.uint32]:
        start = self.starts[index]
        return self.tokens[start : start + self.lengths[index]]

    def save(self, path: Path) -> None:
        """Write the .npz that read_corpus reads; readers see all of it or nothing."""
        smallest = np.uint16 if self.tokens.max(initial=0) < 2**16 else np.uint32
        scratch = path.with_name(f".{path.name}")
        with scratch.open("wb") as file:
            np.savez(
                file,
                tokens=self.tokens.astype(smallest),
                lengths=self.lengths.astype(np.int32),
                response_start=self.response_start.astype(np.int32),
            )
        scratch.replace(path)


def make_corpus(sequences: Sequence[Sequence[int]], response_start: Sequence[int]) -> Corpus:
    return Corpus(
        np.concatenate([np.asarray(sequence, np.uint32) for sequence in sequences]),
        np.array([len(sequence) for sequence in sequences], np.int64),
        np.array(response_start, np.int64),
    )


def read_corpus(path: Path, vocab_size: int) -> Corpus:
    """Read a .npz of `tokens`, `lengths` and `response_start`. Raises UnknownModel naming file, array and value."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in ARRAYS if name not in file]
            arrays: dict[str, NDArray[Any]] = {name: file[name] for name in ARRAYS if name not in missing}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UnknownModel(f"training data {path} cannot be read: {error}") from error
    if missing:
        raise UnknownModel(f"training data {path}: array {missing[0]} is missing")
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "ui" or not len(array):
            raise UnknownModel(
                f"training data {path}: {name} is {array.dtype} {list(array.shape)}, a list of integers is needed"
            )
    tokens, lengths, begins = (arrays[name].astype(np.int64) for name in ARRAYS)
    if len(lengths) != len(begins) or lengths.min() < 1 or lengths.sum() != len(tokens):
        raise UnknownModel(
            f"training data {path}: {len(lengths)} lengths of sum {lengths.sum()} and {len(begins)} response starts do "
            f"not divide {len(tokens)} tokens"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UnknownModel(f"training data {path}: token id {tokens.max()} is not in [0, {vocab_size})")
    if begins.min() < 1 or (begins > lengths).any():
        raise UnknownModel(f"training data {path}: a response_start lies outside its sequence")
    return Corpus(tokens.astype(np.uint32), lengths, begins)


def cut(corpus: Corpus, max_len: int, shortest_response: int = 2) -> Corpus:
    """Sequences cut to max_len tokens; those left with less than an anchor and a label are dropped."""
    kept = [
        (corpus.sequence(index)[:max_len], int(corpus.response_start[index]))
        for index in range(len(corpus))
        if min(max_len, corpus.lengths[index]) - corpus.response_start[index] >= shortest_response
    ]
    if not kept:
        return Corpus(np.empty(0, np.uint32), np.empty(0, np.int64), np.empty(0, np.int64))
    return make_corpus([tokens.tolist() for tokens, _ in kept], [start for _, start in kept])


def held_out(corpus: Corpus, fraction: float) -> NDArray[np.bool_]:
    """Which sequences are never trained on: by their own tokens, so more data moves none, and copies stay together."""
    place = [zlib.crc32(corpus.sequence(index).tobytes()) / 2**32 for index in range(len(corpus))]
    return np.array(place) < fraction


def response_counts(corpora: Sequence[Corpus], vocab_size: int) -> IntArray:
    """How often each id stands in a response: [vocab_size]."""
    counts = np.zeros(vocab_size, np.int64)
    for corpus in corpora:
        within = np.arange(len(corpus.tokens)) - np.repeat(corpus.starts, corpus.lengths)
        in_response = within >= np.repeat(corpus.response_start, corpus.lengths)
        counts += np.bincount(corpus.tokens[in_response], minlength=vocab_size)
    return counts


def frequent_ids(counts: IntArray, size: int) -> tuple[int, ...]:
    """The `size` most frequent ids, ties by id, ascending."""
    ranked = np.lexsort((np.arange(len(counts)), -counts))
    return tuple(sorted(int(token) for token in ranked[:size]))
