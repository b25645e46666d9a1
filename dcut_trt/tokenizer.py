"""The bundle's tokenizer and chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
import tokenizers

from dcut_trt.detokenizer import Detokenizer
from dcut_trt.errors import BundleError, InvalidRequest, UnsupportedOption
from dcut_trt.manifest import TokenizerSpec

TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"


class Tokenizer:
    """Text to ids and back."""

    def __init__(self, core: tokenizers.Tokenizer, spec: TokenizerSpec, template: str | None = None) -> None:
        self._core = core
        self._special = {token_id: token.content for token_id, token in core.get_added_tokens_decoder().items()}
        special = {token_id for token_id, token in core.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(special)
        self._byte_ids = _byte_fallback_ids(core)
        self._bos_id = spec.bos_id
        self.eos_ids = spec.eos_ids
        self.vocab_size = spec.vocab_size
        self.chat_template = template
        self._template = None if template is None else _compile_template(template)

    @classmethod
    def load(cls, bundle: Path, spec: TokenizerSpec) -> Tokenizer:
        """Read BUNDLE/tokenizer.json and, where there is one, BUNDLE/chat_template.jinja. Raises BundleError."""
        try:
            core = tokenizers.Tokenizer.from_file(str(bundle / TOKENIZER_NAME))
        except Exception as error:  # the library raises plain Exception for every malformed file
            raise BundleError(f"{bundle / TOKENIZER_NAME} cannot be read: {error}") from error
        template_path = bundle / TEMPLATE_NAME
        try:
            template = template_path.read_text(encoding="utf-8") if template_path.is_file() else None
            return cls(core, spec, template)
        except (jinja2.TemplateError, ValueError) as error:
            raise BundleError(f"{template_path} cannot be read: {error}") from error

    @property
    def bos_token(self) -> str | None:
        return None if self._bos_id is None else self._special.get(self._bos_id)

    @property
    def eos_token(self) -> str | None:
        return self._special.get(self.eos_ids[0]) if self.eos_ids else None

    def to_json(self) -> str:
        """The contents of a tokenizer.json that gives the same ids."""
        return self._core.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; add_special_tokens False for text that a chat template rendered."""
        return list(self._core.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A stream of text whose pieces join to decode() of all its ids."""
        decode = functools.partial(self.decode, skip_special_tokens=skip_special_tokens)
        return Detokenizer(decode, self._byte_ids, self.special_ids if skip_special_tokens else frozenset())

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text for a list of {"role", "content"} messages, ready for the assistant's turn.

        Raises UnsupportedOption when the model has no template, InvalidRequest when the template refuses them.
        """
        if self._template is None:
            raise UnsupportedOption("chat: this model has no chat template; send text or token_ids")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
            )
        except Exception as error:  # a stranger's program: it may break in any way on messages it did not expect
            raise InvalidRequest(
                "chat.messages", f"{len(messages)} messages", f"refused by template: {error}"
            ) from error


def _byte_fallback_ids(core: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of the pieces <0x00> .. <0xFF>, where the decoder takes them for bytes."""
    ids = [core.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    letter = ids[ord("A")]
    if letter is None or core.decode([letter], skip_special_tokens=False) != "A":
        return frozenset()
    return frozenset(token_id for token_id in ids if token_id is not None)


def _compile_template(source: str) -> jinja2.Template:
    # A template comes with a downloaded model: the sandbox keeps it from reaching Python objects.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
