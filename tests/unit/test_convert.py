"""Protobuf messages to requests and back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dcut_server import convert
from dcut_server.client import build_request
from dcut_server.generated.dcut.v1 import dcut_pb2
from dcut_server.outbox import Parcel
from dcut_trt.backends.scripted import byte_tokenizer
from dcut_trt.errors import InvalidRequest, UnsupportedOption
from dcut_trt.manifest import TokenizerSpec
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.tokenizer import Tokenizer
from dcut_trt.types import FinishReason, Request, RequestTimes, SamplingParams, StepEvent, TokenLogprob, Usage

TOKENIZER = byte_tokenizer()


def converted(message: dcut_pb2.GenerateRequest) -> Request:
    return convert.request_from_proto(message, TOKENIZER, max_len=64, deadline=None)


def test_every_field_arrives() -> None:
    message = build_request(
        [5, 6],
        request_id="mine",
        max_tokens=9,
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        seed=2**63 - 1,
        stop=["a", "bc"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        min_tokens=4,
        logprobs=2,
        n=3,
        priority=-7,
        skip_special_tokens=False,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={9: 1.5, 3: -100.0},
    )
    sampling = SamplingParams(0.7, 3, 0.9, 2**63 - 1, 0.1, 1.5, -0.5, 0.25, ((3, -100.0), (9, 1.5)))
    assert convert.request_from_proto(message, TOKENIZER, 64, deadline=12.5) == Request(
        "mine", (5, 6), 9, sampling, ("a", "bc"), (1, 2), True, 12.5, 4, 2, -7, False
    )
    assert convert.streams_from_proto(message) == 3
    inputs = {"text", "token_ids", "chat"}
    unset = {field.name for field in message.DESCRIPTOR.fields} - {field.name for field, _ in message.ListFields()}
    assert unset == inputs - {"token_ids"}, "this test sets every field"
    assert len(message.sampling.ListFields()) == len(message.sampling.DESCRIPTOR.fields)


def test_unset_fields_keep_the_defaults_and_zeros_do_not_count_as_unset() -> None:
    request = converted(build_request("hi"))
    assert (request.max_tokens, request.sampling, request.deadline) == (64, SamplingParams(), None)
    assert (request.stop, request.stop_token_ids, request.ignore_eos) == ((), (), False)
    assert request == Request(request.request_id, request.prompt_ids, 64)
    assert convert.streams_from_proto(build_request("hi")) == 1
    zeros = converted(build_request("hi", min_tokens=0, logprobs=0, min_p=0.0, repetition_penalty=0.0, priority=0))
    assert (zeros.logprobs, zeros.sampling.repetition_penalty) == (0, 0.0)
    zeros = converted(build_request("hi", max_tokens=0, temperature=0.0, top_k=0, top_p=0.0, seed=0))
    assert (zeros.max_tokens, zeros.sampling) == (0, SamplingParams(0.0, 0, 0.0, 0))


def test_ids_out_of_range_arrive_as_sent() -> None:
    request = converted(build_request([-1, 2**40], stop_token_ids=[2**62], max_tokens=-3))
    assert (request.prompt_ids, request.stop_token_ids, request.max_tokens) == ((-1, 2**40), (2**62,), -3)


def test_the_server_makes_distinct_ids() -> None:
    first, second = converted(build_request("a")), converted(build_request("a"))
    assert first.request_id != second.request_id
    assert first.request_id


def test_text_and_chat_are_tokenized() -> None:
    assert converted(build_request("hé")).prompt_ids == tuple(TOKENIZER.encode("hé"))
    chat = converted(build_request([{"role": "user", "content": "hé"}]))
    assert TOKENIZER.decode(chat.prompt_ids) == "user: hé\nassistant: "


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (dcut_pb2.GenerateRequest(), "input"),
        (dcut_pb2.GenerateRequest(chat=dcut_pb2.Chat()), "chat.messages"),
        (dcut_pb2.GenerateRequest(text="a", request_id="x" * 129), "request_id"),
        (dcut_pb2.GenerateRequest(text="a", stop_token_ids=[1] * 1025), "stop_token_ids"),
    ],
)
def test_what_the_wire_allows_and_we_do_not(message: dcut_pb2.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        converted(message)
    assert caught.value.field == field


@pytest.mark.parametrize("where", ["request", "sampling"])
def test_unknown_fields_are_refused(where: str) -> None:
    extra = b"\xf8\x06\x01"  # field 111, varint 1
    message = build_request("a", temperature=0.5)
    if where == "request":
        message.MergeFromString(extra)
    else:
        message.sampling.MergeFromString(extra)
    with pytest.raises(InvalidRequest, match="111") as caught:
        converted(message)
    assert caught.value.field == where


def test_chat_without_a_template_is_refused() -> None:
    bare = Tokenizer(TOKENIZER._core, TokenizerSpec("none", 258, None, (256,)))
    with pytest.raises(UnsupportedOption, match="chat template"):
        convert.request_from_proto(build_request([{"role": "user", "content": "a"}]), bare, 64, None)


@pytest.mark.parametrize("finish", [None, *FinishReason])
def test_a_parcel_becomes_one_message(finish: FinishReason | None) -> None:
    usage = Usage(1, 2, 3, 40, 30, 20)
    parcel = Parcel()
    parcel.add(StepEvent("r", (7, 8), "x", usage))
    parcel.add(StepEvent("r", (9,), "y", usage, finish))
    message = convert.parcel_to_proto("r", parcel)
    assert (message.request_id, list(message.token_ids), message.text, message.steps) == ("r", [7, 8, 9], "xy", 2)
    assert convert.FINISH_FROM_PROTO.get(message.finish_reason) is finish
    assert message.HasField("usage") == (finish is not None)
    if finish is not None:
        assert convert.usage_from_proto(message.usage) == usage


@pytest.mark.parametrize("matched", [None, "END", 0, 7])
def test_logprobs_index_and_what_matched_come_back_as_they_were(matched: str | int | None) -> None:
    usage = Usage(1, 2, 3, 40, 30, 20, 16)
    entries = (TokenLogprob(7, -0.5, ((7, -0.5), (1, -2.0))), TokenLogprob(8, -1.5))
    parcel = Parcel()
    parcel.add(StepEvent("r", (7,), "x", usage, logprobs=entries[:1]))
    times = RequestTimes(1.0, 2.0, 3.0, 4.0)
    parcel.add(StepEvent("r", (8,), "y", usage, FinishReason.STOP, None, entries[1:], matched, times))
    assert parcel.times is times
    message = convert.parcel_to_proto("r", parcel, 2)
    assert tuple(convert.logprob_from_proto(entry) for entry in message.logprobs) == entries
    assert (message.index, convert.matched_from_proto(message)) == (2, matched)
    assert convert.usage_from_proto(message.usage) == usage


@pytest.mark.parametrize("streams", [-1, 0, 17, 2**40])
def test_too_many_streams_are_refused(streams: int) -> None:
    with pytest.raises(InvalidRequest, match=r"\[1, 16\]") as caught:
        convert.streams_from_proto(build_request("a", n=streams))
    assert caught.value.field == "n"


def test_every_finish_reason_has_a_value_of_its_own() -> None:
    assert set(convert.FINISH_TO_PROTO) == set(FinishReason)
    assert sorted(convert.FINISH_FROM_PROTO) == [1, 2, 3]


def test_cost_tables() -> None:
    assert convert.cost_table_to_proto(None) == dcut_pb2.GetCostTableResponse(state="missing")
    table = CostTable((1, 4), (0.5, 1.0), np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([0.5, 0.6]), "f", "t", "stale")
    message = convert.cost_table_to_proto(table)
    assert (message.state, message.fingerprint, message.measured_at, list(message.ratios)) == (
        "stale",
        "f",
        "t",
        [0.5, 1.0],
    )
    assert [(row.batch, list(row.cost_ms), row.plain_ms) for row in message.rows] == [
        (1, [1.0, 2.0], 0.5),
        (4, [3.0, 4.0], 0.6),
    ]
    without = convert.cost_table_to_proto(dataclasses.replace(table, plain_ms=None))
    assert [(list(row.cost_ms), row.plain_ms) for row in without.rows] == [([1.0, 2.0], 0.0), ([3.0, 4.0], 0.0)]
