"""The bundle's tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
import tokenizers

from dcut_trt.errors import BundleError, InvalidRequest, UnsupportedOption
from dcut_trt.manifest import TokenizerSpec

TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"


class Tokenizer:
    """Text to ids and back. Special tokens are hidden in decoded text."""

    def __init__(self, core: tokenizers.Tokenizer, spec: TokenizerSpec, template: str | None = None) -> None:
        self._core = core
        self._special = {token_id: token.content for token_id, token in core.get_added_tokens_decoder().items()}
        self._bos_id = spec.bos_id
        self.eos_ids = spec.eos_ids
        self.vocab_size = spec.vocab_size
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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; add_special_tokens False for text that a chat template rendered."""
        return list(self._core.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._core.decode(list(ids), skip_special_tokens=True)

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
                bos_token=self._special.get(self._bos_id, "") if self._bos_id is not None else "",
                eos_token=self._special.get(self.eos_ids[0], "") if self.eos_ids else "",
            )
        except Exception as error:  # a stranger's program: it may break in any way on messages it did not expect
            raise InvalidRequest(
                "chat.messages", f"{len(messages)} messages", f"refused by template: {error}"
            ) from error


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
