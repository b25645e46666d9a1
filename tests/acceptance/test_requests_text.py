"""R5, R6: deltas join to the decoding of all ids, for byte-level and SentencePiece-style tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from dcut_trt.backends.scripted import byte_tokenizer
from dcut_trt.detokenizer import REPLACEMENT, Detokenizer
from dcut_trt.manifest import TokenizerSpec
from dcut_trt.tokenizer import Tokenizer

Decode = Callable[[Sequence[int]], str]

BYTES = byte_tokenizer()
TEXTS = ["plain", "naïve café", "日本語", "👩‍👩‍👧‍👦 🇩🇪", "é🚀\n\ttab", "\x00", " two  spaces ", REPLACEMENT]


WORDS = ["<unk>", "<s>", "▁", "▁a", "a", "▁the", "the", "▁▁", ".", "日"]
FIRST_BYTE = len(WORDS)
STRIPPING = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
METASPACE = (decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always"))


def sentencepiece(*steps: decoders.Decoder) -> Tokenizer:
    """Words that begin with a space, byte fallback, and the first space of a text stripped, as Llama 2 has them."""
    vocabulary = {word: index for index, word in enumerate([*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(list(steps))
    core.add_special_tokens(["<s>"])
    return Tokenizer(core, TokenizerSpec("pieces", FIRST_BYTE + 256, 1, (1,)))


PIECES = {"stripping": sentencepiece(*STRIPPING), "metaspace": sentencepiece(*METASPACE)}


def stream_of(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], *, hidden: bool) -> list[str]:
    """Deltas of pushing ids in parts that end at the cuts, and of the flush."""
    return deltas_of(tokenizer.detokenizer(skip_special_tokens=hidden), ids, cuts)


def stream(decode: Decode, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    return deltas_of(Detokenizer(decode), ids, cuts)


def deltas_of(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    ends = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    deltas = [detokenizer.push(ids[start:end]) for start, end in pairwise(ends) if end > start]
    return [*deltas, detokenizer.flush()]


cut_lists = st.lists(st.integers(0, 200), max_size=30)


@given(st.lists(st.integers(0, 257), max_size=40), cut_lists)
def test_r5_deltas_join_to_the_decoding_of_any_ids(ids: list[int], cuts: list[int]) -> None:
    assert "".join(stream(BYTES.decode, ids, cuts)) == BYTES.decode(ids)


# "<" could begin the name of a special token.
@given(st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=20), cut_lists)
def test_r5_any_text_comes_back_without_a_broken_character(text: str, cuts: list[int]) -> None:
    deltas = stream(BYTES.decode, BYTES.encode(text), cuts)
    assert "".join(deltas) == text
    assert all(delta in text for delta in deltas)


@pytest.mark.parametrize("text", TEXTS)
def test_r5_one_id_at_a_time(text: str) -> None:
    ids = BYTES.encode(text)
    assert "".join(stream(BYTES.decode, ids, range(len(ids)))) == text


@pytest.mark.parametrize("text", ["日本語", "a👩"])
def test_r5_an_end_inside_a_character_shows_the_replacement(text: str) -> None:
    ids = BYTES.encode(text)
    for end in range(len(ids)):
        assert "".join(stream(BYTES.decode, ids[:end], range(end))) == BYTES.decode(ids[:end])


def test_r5_nothing_of_a_character_is_shown_before_it_is_complete() -> None:
    detokenizer = Detokenizer(BYTES.decode)
    assert [detokenizer.push([token]) for token in BYTES.encode("日b")] == ["", "", "日", "b"]


def test_r6_special_tokens_are_hidden_and_do_not_disturb_their_neighbours() -> None:
    ids = [*BYTES.encode("a"), 256, 257, *BYTES.encode("é"), 256]
    assert "".join(stream(BYTES.decode, ids, range(len(ids)))) == "aé"


pieces = st.integers(0, FIRST_BYTE - 1)
some_bytes = st.binary(max_size=4) | st.sampled_from([character.encode() for character in "a é日👩"])
byte_runs = some_bytes.map(lambda run: [FIRST_BYTE + byte for byte in run])
piece_lists = st.lists(pieces.map(lambda piece: [piece]) | byte_runs, max_size=12)


@settings(max_examples=400)
@given(st.sampled_from(sorted(PIECES)), piece_lists, cut_lists, st.booleans())
def test_r6_any_ids_of_a_sentencepiece_tokenizer(
    name: str, parts: list[list[int]], cuts: list[int], hidden: bool
) -> None:
    ids = [token for part in parts for token in part]
    whole = PIECES[name].decode(ids, skip_special_tokens=hidden)
    assert "".join(stream_of(PIECES[name], ids, cuts, hidden=hidden)) == whole
    assert "".join(stream_of(PIECES[name], ids, range(len(ids)), hidden=hidden)) == whole


@given(st.text("a é日👩", max_size=12), cut_lists)
def test_r6_characters_that_sentencepiece_spells_in_bytes(text: str, cuts: list[int]) -> None:
    ids = [FIRST_BYTE + byte for byte in text.encode()]
    tokenizer = PIECES["stripping"]
    assert "".join(stream_of(tokenizer, ids, cuts, hidden=True)) == tokenizer.decode(ids)


def test_r6_a_byte_run_is_shown_when_the_next_piece_has_ended_it() -> None:
    detokenizer = PIECES["stripping"].detokenizer()
    run = [FIRST_BYTE + byte for byte in "é".encode()]
    assert [detokenizer.push([token]) for token in (*run, WORDS.index("<s>"), WORDS.index("▁a"))] == ["", "", "", "é a"]


@given(st.lists(st.integers(0, 257), max_size=40), cut_lists)
def test_r6_special_tokens_are_shown_when_asked(ids: list[int], cuts: list[int]) -> None:
    whole = BYTES.decode(ids, skip_special_tokens=False)
    assert whole.count("<eos>") >= ids.count(256)
    assert "".join(stream_of(BYTES, ids, cuts, hidden=False)) == whole


def test_r5_what_stands_before_an_incomplete_character_is_shown() -> None:
    core = tokenizers.Tokenizer(tokenizers.models.BPE({"abâ": 0, "Ĥ¬": 1}, []))  # "ab" + E2, 82 AC
    core.decoder = decoders.ByteLevel()
    detokenizer = Tokenizer(core, TokenizerSpec("joined", 2, None, ())).detokenizer()
    assert [detokenizer.push([0]), detokenizer.push([1])] == ["ab", "€"]


def test_r5_a_long_run_of_invalid_bytes_arrives_in_full() -> None:
    ids = [BYTES.encode("é")[0]] * 300
    assert "".join(stream(BYTES.decode, ids, range(len(ids)))) == REPLACEMENT * 300
