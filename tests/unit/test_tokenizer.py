"""The bundle's tokenizer and its chat template, which comes from strangers and runs in a sandbox."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dcut_trt.backends.scripted import byte_tokenizer
from dcut_trt.errors import BundleError, InvalidRequest, UnsupportedOption
from dcut_trt.manifest import TokenizerSpec
from dcut_trt.tokenizer import TEMPLATE_NAME, TOKENIZER_NAME, Tokenizer

SPEC = TokenizerSpec("scripted", 258, 257, (256,))
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    byte_tokenizer()._core.save(str(tmp_path / TOKENIZER_NAME))
    return tmp_path


def with_template(bundle: Path, template: str) -> Tokenizer:
    (bundle / TEMPLATE_NAME).write_text(template, encoding="utf-8")
    return Tokenizer.load(bundle, SPEC)


def test_a_loaded_tokenizer_gives_text_back_and_hides_special_tokens(bundle: Path) -> None:
    tokenizer = Tokenizer.load(bundle, SPEC)
    ids = tokenizer.encode("naïve 日本 👩")
    assert tokenizer.decode([257, *ids, 256]) == "naïve 日本 👩"
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ((256,), 258)


def test_an_unreadable_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=TOKENIZER_NAME):
        Tokenizer.load(tmp_path, SPEC)
    (tmp_path / TOKENIZER_NAME).write_text("{", encoding="utf-8")
    with pytest.raises(BundleError, match=TOKENIZER_NAME):
        Tokenizer.load(tmp_path, SPEC)


def test_a_template_sees_messages_special_tokens_and_the_generation_prompt(bundle: Path) -> None:
    template = (
        "{{ bos_token }}{% for message in messages %}\n"
        "{{ message['role'] }}={{ message.content | trim }};\n"
        "{% endfor %}{% if add_generation_prompt %}assistant={% endif %}{{ eos_token }}"
    )
    assert with_template(bundle, template).render_chat(CHAT) == "<bos>system=Be brief.;\nuser=Hi;\nassistant=<eos>"


def test_templates_may_use_what_transformers_offers_them(bundle: Path) -> None:
    template = "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
    rendered = with_template(bundle, template + "|{{ strftime_now('%Y') }}").render_chat(CHAT)
    assert re.fullmatch(r'\{"role": "system", "content": "Be brief\."\}\|\d{4}', rendered)


def test_without_a_template_chat_is_refused(bundle: Path) -> None:
    with pytest.raises(UnsupportedOption, match="no chat template"):
        Tokenizer.load(bundle, SPEC).render_chat(CHAT)


def test_what_the_template_refuses_reaches_the_caller(bundle: Path) -> None:
    tokenizer = with_template(bundle, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match=r"chat\.messages.*roles must alternate"):
        tokenizer.render_chat(CHAT)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(bundle: Path, attack: str) -> None:
    tokenizer = with_template(bundle, attack)
    with pytest.raises(InvalidRequest, match=r"chat\.messages"):
        tokenizer.render_chat(CHAT)


@pytest.mark.parametrize("fault", ["{{ 1 + 'a' }}", "{{ 1 // 0 }}", "{% for i in range(999999999) %}x{% endfor %}"])
def test_a_template_that_breaks_while_rendering_fails_the_request(bundle: Path, fault: str) -> None:
    tokenizer = with_template(bundle, fault)
    with pytest.raises(InvalidRequest, match=r"chat\.messages"):
        tokenizer.render_chat(CHAT)


def test_a_template_that_is_none_is_named_at_load(bundle: Path) -> None:
    with pytest.raises(BundleError, match=TEMPLATE_NAME):
        with_template(bundle, "{% for message in %}")
