"""What a bundle needs from a target's tokenizer: tokenizer.json, chat template, and the ids that begin and end text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dcut_engines.gguf_file import GgufFile
from dcut_engines.gguf_tokenizer import build_tokenizer
from dcut_engines.hf_config import read_json
from dcut_trt.errors import UnknownModel, UnsupportedModel

# Chat models end a turn with one of these, even where their config lists only the end-of-text token.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """tokenizer_json: the text of tokenizer.json.  vocab_size: highest id + 1.

    vocabulary_sha256 is over all (id, token) pairs, so it is the same for every container of one tokenizer.
    """

    tokenizer_json: str
    vocabulary_sha256: str
    vocab_size: int
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]


def read_gguf_tokenizer(file: GgufFile) -> TokenizerFiles:
    """The tokenizer of a GGUF target. Raises UnknownModel or UnsupportedModel as build_tokenizer does."""
    fields = file.metadata
    eos_ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return _collect(
        source=str(file.path),
        tokenizer=(tokenizer := build_tokenizer(file)),
        tokenizer_json=tokenizer.to_str(),
        chat_template=template if isinstance(template := fields.get("tokenizer.chat_template"), str) else None,
        bos_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_ids=eos_ids,
    )


def read_directory_tokenizer(directory: Path) -> TokenizerFiles:
    """The tokenizer of a Hugging Face directory.

    Raises UnsupportedModel when it has no tokenizer.json, UnknownModel when a file of it cannot be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(f"{directory}: tokenizer.json is missing; a fast tokenizer is needed")
    try:
        text = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare Exception
        raise UnknownModel(f"{path} cannot be read: {error}") from error
    config = read_json(directory / "config.json")
    generation = _optional_json(directory / "generation_config.json")
    settings = _optional_json(directory / "tokenizer_config.json")
    eos_ids = _as_list(generation.get("eos_token_id", config.get("eos_token_id")))
    if (token := _token_text(settings.get("eos_token"))) is not None:
        eos_ids.append(tokenizer.token_to_id(token))
    return _collect(
        source=str(directory),
        tokenizer=tokenizer,
        tokenizer_json=text,
        chat_template=_directory_chat_template(directory, settings),
        bos_id=generation.get("bos_token_id", config.get("bos_token_id")),
        eos_ids=eos_ids,
    )


def _collect(
    source: str,
    tokenizer: Tokenizer,
    tokenizer_json: str,
    chat_template: str | None,
    bos_id: int | None,
    eos_ids: Iterable[Any],
) -> TokenizerFiles:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    vocab_size = max(vocab.values(), default=-1) + 1
    turn_ends = [vocab.get(token) for token in TURN_ENDS if chat_template and token in chat_template]
    ends = sorted({token for token in (*eos_ids, *turn_ends) if token is not None})
    for token in (*ends, *([] if bos_id is None else [bos_id])):
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise UnknownModel(f"{source}: bos or eos token id {token!r} is not in the vocabulary of {vocab_size}")
    pairs = sorted((index, token) for token, index in vocab.items())
    digest = hashlib.sha256(json.dumps(pairs, ensure_ascii=False).encode()).hexdigest()
    return TokenizerFiles(tokenizer_json, digest, vocab_size, chat_template, bos_id, tuple(ends))


def _directory_chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # named templates; "default" is the chat one
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
