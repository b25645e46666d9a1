"""The served tokenizer as a zip that Hugging Face's AutoTokenizer, or a gateway, loads."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

from dcut_trt.tokenizer import TEMPLATE_NAME, TOKENIZER_NAME, Tokenizer

CONFIG_NAME = "tokenizer_config.json"
CHUNK_BYTES = 64 * 1024
EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's first moment: equal tokenizers give equal bytes


def tokenizer_zip(tokenizer: Tokenizer, max_len: int) -> bytes:
    """tokenizer.json, tokenizer_config.json and, where the model has one, chat_template.jinja."""
    files = {TOKENIZER_NAME: tokenizer.to_json(), CONFIG_NAME: json.dumps(_config(tokenizer, max_len), indent=2)}
    if tokenizer.chat_template is not None:
        files[TEMPLATE_NAME] = tokenizer.chat_template
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), text, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def chunks(data: bytes) -> list[bytes]:
    """At least one, of at most CHUNK_BYTES."""
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)] or [b""]


def _config(tokenizer: Tokenizer, max_len: int) -> dict[str, Any]:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
    return {name: value for name, value in config.items() if value is not None}
