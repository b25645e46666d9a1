"""Dynamo's requests and chunks against ours, and the model card, without Dynamo."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dcut_server.dynamo.model_card import write_model_card
from dcut_server.dynamo.wire import chunk_from_proto, request_to_proto
from dcut_server.generated.dcut.v1 import dcut_pb2
from dcut_trt.errors import InvalidRequest, UnsupportedOption
from dcut_trt.manifest import MANIFEST_NAME, DrafterSpec, Manifest, TargetSpec, TokenizerSpec


def test_every_option_reaches_the_server() -> None:
    request = {
        "token_ids": [3, 4],
        "sampling_options": {
            "temperature": 0.5,
            "top_k": 7,
            "top_p": 0.9,
            "min_p": 0.1,
            "seed": 5,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "n": 1,
        },
        "stop_conditions": {
            "max_tokens": 9,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop": ["the frontend's"],
            "stop_token_ids": [8],
            "stop_token_ids_hidden": [2],
        },
        "output_options": {"logprobs": 2},
    }
    sampling = dcut_pb2.Sampling(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        seed=5,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
    )
    assert request_to_proto(request) == dcut_pb2.GenerateRequest(
        token_ids=dcut_pb2.TokenIds(ids=[3, 4]),
        sampling=sampling,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[2, 8],
        logprobs=2,
    )


def test_unset_options_stay_unset() -> None:
    unset = {"temperature": None, "top_k": -1, "guided_decoding": None}
    request = {"token_ids": [3], "sampling_options": unset, "stop_conditions": None, "multi_modal_data": {}}
    message = request_to_proto(request)
    assert message == dcut_pb2.GenerateRequest(token_ids=dcut_pb2.TokenIds(ids=[3]), sampling=dcut_pb2.Sampling())


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("sampling_options", "n", 2),
        ("sampling_options", "best_of", 3),
        ("sampling_options", "guided_decoding", {"regex": "a"}),
        ("sampling_options", "use_beam_search", True),
        ("sampling_options", "include_stop_str_in_output", True),
        ("stop_conditions", "max_thinking_tokens", 5),
        ("output_options", "prompt_logprobs", 0),
    ],
)
def test_an_option_that_would_be_ignored_is_refused_by_name(section: str, name: str, value: object) -> None:
    with pytest.raises(UnsupportedOption, match=name):
        request_to_proto({"token_ids": [3], section: {name: value}})


def test_media_are_refused() -> None:
    with pytest.raises(UnsupportedOption, match="multi_modal_data"):
        request_to_proto({"token_ids": [3], "multi_modal_data": {"image_url": []}})


def test_a_value_that_does_not_fit_the_wire_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        request_to_proto({"token_ids": [3], "stop_conditions": {"max_tokens": 2**70}})


def test_the_last_chunk_has_finish_reason_usage_and_every_chunk_its_logprobs() -> None:
    top = [dcut_pb2.TopLogprob(token_id=6, logprob=-0.5), dcut_pb2.TopLogprob(token_id=7, logprob=-1.5)]
    message = dcut_pb2.GenerateResponse(
        token_ids=[6],
        logprobs=[dcut_pb2.TokenLogprob(token_id=6, logprob=-0.5, top=top)],
        finish_reason=dcut_pb2.FINISH_REASON_LENGTH,
        usage=dcut_pb2.Usage(prompt_tokens=5, output_tokens=2, cached_tokens=4),
    )
    assert chunk_from_proto(message) == {
        "token_ids": [6],
        "index": 0,
        "log_probs": [-0.5],
        "top_logprobs": [[{"rank": 1, "token_id": 6, "logprob": -0.5}, {"rank": 2, "token_id": 7, "logprob": -1.5}]],
        "finish_reason": "length",
        "completion_usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_the_model_card_names_what_the_bundle_holds(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    manifest = Manifest(
        schema=1,
        key="k",
        backend="openvino",
        precision="fp32",
        target=TargetSpec("tiny", "t", "qwen3", 2, 16, 4, 2, 4, 99, 512),
        drafter=DrafterSpec("d", "d", 1, 2, 4, 4, 9, (0,), False, 99),
        tokenizer=TokenizerSpec("s", 99, None, (2, 3)),
        draft_length=3,
        ratios=(1.0,),
        captured_batches=(1,),
        token_buckets=(4,),
        max_batch=1,
        max_len=128,
        tensors={},
        files={},
        versions={},
    )
    (bundle / MANIFEST_NAME).write_text(manifest.to_json())
    (bundle / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 2, "content": "<end>"}]}))
    (bundle / "chat_template.jinja").write_text("{{ messages }}")

    assert dataclasses.asdict(write_model_card(bundle, tmp_path / "card")) == dataclasses.asdict(manifest)

    card = {path.name: json.loads(path.read_text()) for path in (tmp_path / "card").iterdir()}
    assert card["config.json"]["architectures"] == ["Qwen3ForCausalLM"]
    assert card["config.json"]["max_position_embeddings"] == 128
    assert card["generation_config.json"] == {"eos_token_id": [2, 3]}
    assert card["tokenizer_config.json"]["eos_token"] == "<end>"
    assert card["tokenizer_config.json"]["chat_template"] == "{{ messages }}"
    assert "bos_token" not in card["tokenizer_config.json"]
