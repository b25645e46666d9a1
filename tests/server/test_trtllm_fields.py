"""Every field of a trtllm.GenerateRequest is served or refused by name: none is ignored."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from live_server import run, serving
from smg_grpc_proto.generated import trtllm_service_pb2
from trtllm_calls import answer, message, stub_of

from dcut_server.trtllm_convert import call_from_proto
from dcut_server.trtllm_fields import NEUTRAL, SERVED
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import InvalidRequest

PATHS = {
    "GenerateRequest": "",
    "TokenizedInput": "tokenized.",
    "SamplingConfig": "sampling_config.",
    "OutputConfig": "output_config.",
}
SET: dict[str, Any] = {
    "guided_decoding": {"guide_type": "GUIDE_TYPE_JSON"},
    "lora_config": {"task_id": 7},
    "prompt_tuning_config": {"embedding_table": b"x"},
    "multimodal_input": {"image_data": [b"x"]},
    "kv_cache_retention": {"policy": "keep"},
    "disaggregated_params": {"request_type": "REQUEST_TYPE_CONTEXT_ONLY"},
    "lookahead_config": {"max_ngram_size": 2},
}
REFUSED = [
    (name, field.name)
    for name, served in SERVED.items()
    for field in trtllm_service_pb2.DESCRIPTOR.message_types_by_name[name].fields
    if field.name not in served
]


def part_of(request: Any, kind: str) -> Any:
    path = PATHS[kind].rstrip(".")
    return getattr(request, path) if path else request


def set_field(part: Any, name: str) -> None:
    """Give a field a value that asks for something."""
    field = part.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None:
        part.MergeFrom(type(part)(**{name: SET[name]}))
        return
    value: Any = {"string": "x", "bytes": b"x", "bool": True}.get(kind_of(field), 3)
    part.MergeFrom(type(part)(**{name: [value] if field.is_repeated else value}))


def kind_of(field: Any) -> str:
    kinds = {field.TYPE_STRING: "string", field.TYPE_BYTES: "bytes", field.TYPE_BOOL: "bool"}
    return kinds.get(field.type, "number")


def test_the_table_names_only_fields_of_the_contract() -> None:
    types = trtllm_service_pb2.DESCRIPTOR.message_types_by_name
    for name, served in SERVED.items():
        assert served <= set(types[name].fields_by_name), name
    unserved = {name for _, name in REFUSED}
    assert set(NEUTRAL) <= unserved
    assert {
        "bad",
        "bad_token_ids",
        "embedding_bias",
        "cache_salt_id",
        "query_token_ids",
        "beam_width_array",
    } <= unserved


@pytest.mark.parametrize(("kind", "name"), REFUSED)
def test_a_field_that_is_not_served_is_refused_by_name(kind: str, name: str) -> None:
    request = message([1, 2])
    set_field(part_of(request, kind), name)
    with pytest.raises(InvalidRequest, match="not supported by this server") as caught:
        call_from_proto(request, None)
    assert caught.value.field == PATHS[kind] + name
    assert len(str(caught.value)) < 200


def test_values_that_ask_for_nothing_are_taken() -> None:
    plain = call_from_proto(message([1], request_id="r"), None)
    for name, values in NEUTRAL.items():
        for value in values:
            where = "output" if name == "prompt_logprobs" else "sampling"
            assert call_from_proto(message([1], request_id="r", **{where: {name: value}}), None) == plain, name
    for name in SET:
        assert call_from_proto(message([1], request_id="r", **{name: {}}), None) == plain, name
    assert call_from_proto(message([1], request_id="r", sampling={"top_k": -1}), None) == plain


@pytest.mark.parametrize("kind", PATHS)
def test_a_field_of_a_newer_contract_is_refused(kind: str) -> None:
    request = message([1, 2])
    part_of(request, kind).MergeFromString(b"\xf8\x06\x01")  # field 111, varint 1
    with pytest.raises(InvalidRequest, match="111"):
        call_from_proto(request, None)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [258]}, "token_ids[0]=258"),
    ({"prompt": [65] * 256}, "256 tokens"),
    ({"sampling": {"seed": 2**63}}, f"seed={2**63}"),
    ({"sampling": {"seed": 2**63 - 1, "num_return_sequences": 2}}, f"seed={2**63 - 1}"),
    ({"sampling": {"num_return_sequences": 17}}, "num_return_sequences=17"),
    ({"sampling": {"beam_width": 2}}, "sampling_config.beam_width=2"),
    ({"sampling": {"top_p": 0.0}}, "top_p=0.0"),
    ({"sampling": {"top_k": -2}}, "top_k=-2"),
    ({"sampling": {"temperature": -1.0}}, "temperature=-1.0"),
    ({"sampling": {"min_p": 1.5}}, "min_p=1.5"),
    ({"sampling": {"repetition_penalty": 0.0}}, "repetition_penalty=0.0"),
    ({"sampling": {"presence_penalty": 3.0}}, "presence_penalty=3.0"),
    ({"sampling": {"frequency_penalty": -3.0}}, "frequency_penalty=-3.0"),
    ({"sampling": {"min_tokens": 41}}, "min_tokens=41"),
    ({"output": {"logprobs": 21}}, "logprobs=21"),
    ({"output": {"logprobs": -1}}, "logprobs=-1"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop_token_ids": [258]}, "stop_token_ids[0]=258"),
    ({"stop_token_ids": [1] * 1025}, "1025 ids"),
    ({"request_id": "i" * 129}, "129 characters"),
    ({"bad_token_ids": [4]}, "bad_token_ids"),
]


def test_refusals_have_their_code_name_the_field_and_cost_nothing() -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (server, client), stub_of(server.address) as stub:
            for fields, word in BAD:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await answer(stub, message(**{"prompt": [1, 2], **fields}))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, fields
                assert word in caught.value.details(), (word, caught.value.details())
            assert (await client.info()).totals.requests_finished == 0

    run(test)
