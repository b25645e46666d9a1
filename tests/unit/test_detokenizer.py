"""Deltas join to the decoding of all ids, for byte-level and SentencePiece-style tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from dcut_trt.backends.scripted import byte_tokenizer
from dcut_trt.detokenizer import REPLACEMENT, Detokenizer

Decode = Callable[[Sequence[int]], str]

BYTES = byte_tokenizer()
TEXTS = ["plain", "naïve café", "日本語", "👩‍👩‍👧‍👦 🇩🇪", "é🚀\n\ttab", "\x00", " two  spaces ", REPLACEMENT]


def sentencepiece() -> tokenizers.Tokenizer:
    """Words that begin with a space, byte fallback, and the first space of a text stripped, as Llama 2 has them."""
    words = ["<unk>", "<s>", "▁", "▁a", "a", "▁the", "the", "▁▁", ".", "日"]
    vocabulary = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    parts = tokenizers.decoders
    core.decoder = parts.Sequence([parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)])
    core.add_special_tokens(["<s>"])
    return core


PIECES = sentencepiece()
FIRST_BYTE = 10


def decode_pieces(ids: Sequence[int]) -> str:
    return str(PIECES.decode(list(ids), skip_special_tokens=True))


def stream(decode: Decode, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Deltas of pushing ids in parts that end at the cuts, and of the flush."""
    detokenizer = Detokenizer(decode)
    ends = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    deltas = [detokenizer.push(ids[start:end]) for start, end in pairwise(ends) if end > start]
    return [*deltas, detokenizer.flush()]


cut_lists = st.lists(st.integers(0, 200), max_size=30)


@given(st.lists(st.integers(0, 257), max_size=40), cut_lists)
def test_any_ids_of_a_byte_tokenizer(ids: list[int], cuts: list[int]) -> None:
    assert "".join(stream(BYTES.decode, ids, cuts)) == BYTES.decode(ids)


# "<" could begin the name of a special token.
@given(st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=20), cut_lists)
def test_any_text_comes_back_without_a_broken_character(text: str, cuts: list[int]) -> None:
    deltas = stream(BYTES.decode, BYTES.encode(text), cuts)
    assert "".join(deltas) == text
    assert all(delta in text for delta in deltas)


@pytest.mark.parametrize("text", TEXTS)
def test_one_id_at_a_time(text: str) -> None:
    ids = BYTES.encode(text)
    assert "".join(stream(BYTES.decode, ids, range(len(ids)))) == text


@pytest.mark.parametrize("text", ["日本語", "a👩"])
def test_an_end_inside_a_character_shows_the_replacement(text: str) -> None:
    ids = BYTES.encode(text)
    for end in range(len(ids)):
        assert "".join(stream(BYTES.decode, ids[:end], range(end))) == BYTES.decode(ids[:end])


def test_nothing_of_a_character_is_shown_before_it_is_complete() -> None:
    detokenizer = Detokenizer(BYTES.decode)
    assert [detokenizer.push([token]) for token in BYTES.encode("日b")] == ["", "", "日", "b"]


def test_special_tokens_are_hidden_and_do_not_disturb_their_neighbours() -> None:
    ids = [*BYTES.encode("a"), 256, 257, *BYTES.encode("é"), 256]
    assert "".join(stream(BYTES.decode, ids, range(len(ids)))) == "aé"


@given(st.lists(st.integers(0, FIRST_BYTE - 1), max_size=30), cut_lists)
def test_spaces_of_sentencepiece_words_are_kept(ids: list[int], cuts: list[int]) -> None:
    assert "".join(stream(decode_pieces, ids, cuts)) == decode_pieces(ids)


@given(st.text("a é日👩", max_size=12), cut_lists)
def test_characters_that_sentencepiece_spells_in_bytes(text: str, cuts: list[int]) -> None:
    ids = [FIRST_BYTE + byte for byte in text.encode()]
    assert "".join(stream(decode_pieces, ids, cuts)) == decode_pieces(ids)


def test_a_long_run_of_invalid_bytes_arrives_in_full() -> None:
    ids = [BYTES.encode("é")[0]] * 300
    assert "".join(stream(BYTES.decode, ids, range(len(ids)))) == REPLACEMENT * 300
