"""What the HTTP API answers: the same as dcut.v1, and errors that name the field."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from http_server import MODEL, Served

from dcut_server.client import Completion, complete
from dcut_trt.types import FinishReason

CHAT = [{"role": "user", "content": "Why is the sky blue?"}]
UNICODE = [{"role": "user", "content": "Répète: 日本語 😀 ñandú"}]


def grpc_answer(server: Served, prompt: Any, **options: Any) -> Completion:
    return complete(server.address, prompt, **options)


def streamed(server: Served, **request: Any) -> tuple[str, Any, str | None, int]:
    """Text, usage, finish reason and number of pieces of a chat stream."""
    pieces, usage, finish = [], None, None
    stream = server.client.chat.completions.create(
        model=MODEL, stream=True, stream_options={"include_usage": True}, **request
    )
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            pieces.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    return "".join(pieces), usage, finish, len([piece for piece in pieces if piece])


@pytest.mark.parametrize("messages", [CHAT, UNICODE])
def test_chat_equals_its_stream_and_dcut_v1(openai_server: Served, messages: list[dict[str, str]]) -> None:
    request: dict[str, Any] = {"messages": messages, "max_tokens": 24, "temperature": 0}
    reply = openai_server.client.chat.completions.create(model=MODEL, **request)
    text, usage, finish, pieces = streamed(openai_server, **request)
    own = grpc_answer(openai_server, messages, max_tokens=24)
    choice = reply.choices[0]
    assert reply.model == MODEL
    assert choice.message.role == "assistant"
    assert choice.message.content == text == own.text != ""
    assert choice.finish_reason == finish == ("length" if own.finish is FinishReason.LENGTH else "stop")
    assert pieces > 1
    for counted in (reply.usage, usage):
        assert (counted.prompt_tokens, counted.completion_tokens) == (own.usage.prompt_tokens, own.usage.output_tokens)
        assert counted.total_tokens == counted.prompt_tokens + counted.completion_tokens


def test_completions_equal_their_stream_and_dcut_v1(openai_server: Served) -> None:
    request: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 20, "temperature": 0}
    completions = openai_server.client.completions
    reply = completions.create(model=MODEL, **request)
    text = "".join(event.choices[0].text for event in completions.create(model=MODEL, stream=True, **request))
    own = grpc_answer(openai_server, request["prompt"], max_tokens=20)
    assert reply.choices[0].text == text == own.text != ""
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == own.usage.prompt_tokens


def test_usage_tells_accepted_and_rejected_drafts_as_dcut_v1_does(openai_server: Served) -> None:
    prompt = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"
    reply = openai_server.client.completions.create(model=MODEL, prompt=prompt, max_tokens=40, temperature=0)
    own = grpc_answer(openai_server, prompt, max_tokens=40)
    assert reply.usage is not None
    details = reply.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == own.usage.accepted > 0
    assert details.rejected_prediction_tokens == own.usage.verified - own.usage.accepted


def test_stop_ends_the_text_before_it(openai_server: Served) -> None:
    whole = grpc_answer(openai_server, CHAT, max_tokens=24).text
    stop = whole[10:14]
    request: dict[str, Any] = {"messages": CHAT, "max_tokens": 24, "temperature": 0, "stop": [stop]}
    reply = openai_server.client.chat.completions.create(model=MODEL, **request)
    text, _, finish, _ = streamed(openai_server, **request)
    own = grpc_answer(openai_server, CHAT, max_tokens=24, stop=[stop])
    assert reply.choices[0].message.content == text == own.text == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == finish == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == own.usage.output_tokens


def test_n_gives_distinct_choices_and_counts_all_of_them(openai_server: Served) -> None:
    reply = openai_server.client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=12, n=2, temperature=1, seed=7
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].text != reply.choices[1].text
    assert reply.usage is not None
    assert 12 < reply.usage.completion_tokens <= 24


def test_a_seed_repeats_a_sampled_completion_and_its_absence_does_not(openai_server: Served) -> None:
    def sample(**options: Any) -> str:
        reply = openai_server.client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=16, temperature=1.5, **options
        )
        return reply.choices[0].text

    assert sample(seed=3) == sample(seed=3)
    assert len({sample() for _ in range(3)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chat_are_those_of_dcut_v1(openai_server: Served, stream: bool) -> None:
    request: dict[str, Any] = {
        "messages": CHAT, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    create = openai_server.client.chat.completions.create
    if stream:
        choices = [choice for event in create(model=MODEL, stream=True, **request) for choice in event.choices]
    else:
        choices = list(create(model=MODEL, **request).choices)
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    own = grpc_answer(openai_server, CHAT, max_tokens=8, logprobs=2)
    assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in own.logprobs], abs=1e-5)
    assert "".join(entry.token for entry in entries) == own.text
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-5) for entry in entries)


def test_chat_without_max_tokens_ends_by_itself(openai_server: Served) -> None:
    reply = openai_server.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say yes."}], temperature=0, stop="."
    )
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"prompt": "many " * 3000}, "2048"),
        ({"prompt": [1, 2, 3]}, "prompt"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(openai_server: Served, fields: dict[str, Any], words: str) -> None:
    request: dict[str, Any] = {"prompt": "Hello", "max_tokens": 4, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        openai_server.client.completions.create(model=MODEL, **request)
    assert words in str(caught.value)


def test_guided_decoding_is_refused_by_name(openai_server: Served) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        openai_server.client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=4, response_format={"type": "json_object"}
        )
    assert caught.value.status_code in (400, 501)
    assert "guided_decoding" in str(caught.value)


def test_another_model_is_a_404_and_ours_is_listed(openai_server: Served) -> None:
    assert [model.id for model in openai_server.client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError, match="another-model"):
        openai_server.client.completions.create(model="another-model", prompt="Hello", max_tokens=4)
