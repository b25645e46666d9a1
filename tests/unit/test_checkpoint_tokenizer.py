"""Tokenizers out of GGUF files and directories: the ids that transformers gives, and the ids that end a sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import CHAT_TEMPLATE, TARGET, TOKENS, random_arrays, tiny_decoder, write_gguf, write_target
from tokenizers import Tokenizer, pre_tokenizers

from dcut_engines.checkpoint import load_target
from dcut_engines.gguf_file import read_gguf
from dcut_engines.gguf_tokenizer import build_tokenizer
from dcut_engines.sources import Source
from dcut_engines.tokenizer_files import read_directory_tokenizer, read_gguf_tokenizer
from dcut_engines.weights import decoder_shapes
from dcut_trt.errors import UnknownModel, UnsupportedModel

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "def f(x):\n    return x + 1\n\n\n\tpass",
    "<|im_start|>user\nWhat's 12345 + 678?<|im_end|>\n<|im_start|>assistant\n",
    "I'm, you're, he'd, WE'LL, it's",
    "naïve café Ünïcödé",
    "你好,世界。日本語のテキスト",
    "emoji 🙂👩‍👩‍👧‍👦 flags 🇩🇪",
    "\u0000control\u0007\ufeff\u200b\u00a0nbsp",
    "mixed<|endoftext|>special <file_sep>tokens<|im_end|",
    "x = {'a': [1,2,3], \"b\": null} // comment",
    "ÀÈÌÒÙ fi ﬁ ﬂ Å",
]


@pytest.fixture(scope="module")
def ours(smollm2_gguf: Path) -> Tokenizer:
    return build_tokenizer(read_gguf(smollm2_gguf))


@pytest.fixture(scope="module")
def theirs(smollm2_gguf: Path) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)


def test_ids_and_text_are_those_of_transformers(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text, add_special_tokens=True), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True), text


@pytest.fixture(scope="module")
def theirs_with_digits(theirs: Any) -> Tokenizer:
    """transformers' tokenizer of the GGUF, with the digit split of SmolLM2's own tokenizer.json.

    transformers knows no tokenizer.ggml.pre=smollm and takes GPT-2's split, which differs where spaces or symbols stand
    before a digit; llama.cpp and the original tokenizer.json split every digit off first.
    """
    core = Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return core


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet=" \n\t0123abcé<|>_endoftxim²", max_size=40))
def test_any_text_encodes_alike_and_comes_back(ours: Tokenizer, theirs_with_digits: Tokenizer, text: str) -> None:
    ids = ours.encode(text).ids
    assert ids == theirs_with_digits.encode(text).ids
    # The vocabulary has no token for a few bytes, which UTF-8 needs only for unassigned planes.
    if all(ours.token_to_id(symbol) is not None for piece in pieces(text) for symbol in piece):
        assert ours.decode(ids, skip_special_tokens=False) == text


def pieces(text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]


def test_digits_stand_alone_even_after_spaces(ours: Tokenizer) -> None:
    assert ours.encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]
    assert ours.encode("x 3").tokens == ["x", "Ġ", "3"]


def test_special_tokens_of_smollm2(smollm2_gguf: Path) -> None:
    files = read_gguf_tokenizer(read_gguf(smollm2_gguf))
    assert (files.bos_id, files.eos_ids, files.vocab_size) == (1, (2,), 49152)
    assert files.chat_template is not None
    assert "<|im_start|>" in files.chat_template
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    special = [index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    assert sorted(special) == list(range(17))
    assert tokenizer.decode([1, 2, 19556], skip_special_tokens=True) == "Hello"


def tiny_gguf(path: Path, **fields: Any) -> Path:
    config = tiny_decoder()
    return write_gguf(path, config, random_arrays(decoder_shapes(config)), fields)


def test_padding_of_the_vocabulary_is_no_token(tmp_path: Path) -> None:
    target = load_target(Source("tiny", tiny_gguf(tmp_path / "tiny.gguf")))
    assert target.config.vocab_size > len(TOKENS) == target.tokenizer.vocab_size


def test_a_gguf_and_a_directory_of_one_model_have_one_vocabulary(tmp_path: Path) -> None:
    from_gguf = read_gguf_tokenizer(read_gguf(tiny_gguf(tmp_path / "tiny.gguf")))
    from_directory = read_directory_tokenizer(write_target(tmp_path / "tiny"))
    assert from_gguf.vocabulary_sha256 == from_directory.vocabulary_sha256
    assert from_gguf.eos_ids == from_directory.eos_ids == (0, 2)  # end of text, and the chat template's turn end


def test_bos_is_prepended_when_the_file_says_so(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "bos.gguf", **{"tokenizer.ggml.add_bos_token": True})
    assert build_tokenizer(read_gguf(path)).encode("a").ids == [1, TOKENS.index("a")]
    path = tiny_gguf(tmp_path / "llama3.gguf", **{"tokenizer.ggml.pre": "llama-bpe"})
    assert build_tokenizer(read_gguf(path)).encode("a").ids == [1, TOKENS.index("a")]


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe"])
def test_other_splits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415

    fields = {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False}
    path = tiny_gguf(tmp_path / "tiny.gguf", **fields)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    ours = build_tokenizer(read_gguf(path))
    for text in TEXTS:
        split = [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str(text)]
        assert split == [piece for piece, _ in theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)], text


def test_eos_ids_of_a_directory(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "tiny")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5], "bos_token_id": 0}))
    files = read_directory_tokenizer(directory)
    assert (files.bos_id, files.eos_ids) == (0, (0, 2, 5))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": len(TOKENS)}))
    with pytest.raises(UnknownModel, match=str(len(TOKENS))):
        read_directory_tokenizer(directory)


def test_a_model_without_chat_template_eos_or_bos(tmp_path: Path) -> None:
    config = {key: value for key, value in TARGET.items() if key not in ("bos_token_id", "eos_token_id")}
    directory = write_target(tmp_path / "tiny", config)
    (directory / "tokenizer_config.json").unlink()
    files = read_directory_tokenizer(directory)
    assert (files.chat_template, files.bos_id, files.eos_ids) == (None, None, ())


def test_where_a_directory_keeps_its_chat_template(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "tiny")
    assert read_directory_tokenizer(directory).chat_template == CHAT_TEMPLATE
    named = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    assert read_directory_tokenizer(directory).chat_template == "D"
    (directory / "chat_template.jinja").write_text("FILE")
    assert read_directory_tokenizer(directory).chat_template == "FILE"


def test_tokenizer_files_that_cannot_be_used(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "tiny")
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(UnknownModel, match=r"tokenizer\.json cannot be read"):
        read_directory_tokenizer(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json is missing"):
        read_directory_tokenizer(directory)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    directory = write_target(tmp_path / "tiny", {**TARGET, "vocab_size": 200})
    with pytest.raises(UnsupportedModel, match=f"ids up to {len(TOKENS) - 1}, the embedding 200 rows"):
        load_target(Source("tiny", directory))
