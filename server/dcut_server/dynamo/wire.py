"""Dynamo's requests to our protobuf messages, and our messages to its chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcut_server.generated.dcut.v1 import dcut_pb2
from dcut_trt.errors import InvalidRequest, UnsupportedOption

FINISH = {dcut_pb2.FINISH_REASON_STOP: "stop", dcut_pb2.FINISH_REASON_LENGTH: "length"}

SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
STOP_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")

# What a caller may ask Dynamo for and we do not do, by section of its request; "" is the request itself. A value in the
# tuple asks for nothing. Stop strings and special tokens are not here: Dynamo's frontend turns ids into text.
UNSUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "sampling_options": {
        "n": (1,),  # one stream only: Dynamo moves a single stream of ids to another worker
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "include_stop_str_in_output": (False,),
        "guided_decoding": (),
    },
    "stop_conditions": {"max_thinking_tokens": ()},
    "output_options": {"prompt_logprobs": ()},
    "": {
        name: ({}, [])
        for name in ("prompt_embeds", "multi_modal_data", "mm_processor_kwargs", "encoder_result", "prefill_result")
    },
}


def request_to_proto(request: Mapping[str, Any]) -> dcut_pb2.GenerateRequest:
    """The same request for a dcut-trt server; the server checks ranges.

    Raises UnsupportedOption for an option that would be ignored, InvalidRequest for a value that cannot be sent.
    """
    sections = {name: request.get(name) or {} for name in UNSUPPORTED if name} | {"": request}
    for section, options in UNSUPPORTED.items():
        for name, harmless in options.items():
            value = sections[section].get(name)
            if value is not None and value not in harmless:
                raise UnsupportedOption(f"{name}={value!r}: not supported")
    sampling, stop, output = sections["sampling_options"], sections["stop_conditions"], sections["output_options"]
    fields: dict[str, Any] = {
        "max_tokens": stop.get("max_tokens"),
        "min_tokens": stop.get("min_tokens"),
        "ignore_eos": stop.get("ignore_eos"),
        "logprobs": output.get("logprobs"),
        "stop_token_ids": sorted({token for name in STOP_IDS for token in stop.get(name) or ()}),
    }
    try:
        return dcut_pb2.GenerateRequest(
            token_ids=dcut_pb2.TokenIds(ids=request["token_ids"]),
            sampling=dcut_pb2.Sampling(**_sampling(sampling)),
            **{name: value for name, value in fields.items() if value is not None},
        )
    except (TypeError, ValueError) as error:
        raise InvalidRequest("request", fields | _sampling(sampling), f"cannot be sent: {error}") from error


def chunk_from_proto(message: dcut_pb2.GenerateResponse) -> dict[str, Any]:
    """One chunk of the answer; the last one has finish_reason and completion_usage."""
    chunk: dict[str, Any] = {"token_ids": list(message.token_ids), "index": 0}
    if message.logprobs:
        chunk["log_probs"] = [token.logprob for token in message.logprobs]
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": top.token_id, "logprob": top.logprob}
                for rank, top in enumerate(token.top, start=1)
            ]
            for token in message.logprobs
        ]
    if message.finish_reason in FINISH:
        usage = message.usage
        chunk["finish_reason"] = FINISH[message.finish_reason]
        chunk["completion_usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
    return chunk


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """The set ones of our fields. Dynamo writes "no top-k" as -1."""
    chosen = {name: options.get(name) for name in SAMPLING}
    if options.get("top_k") not in (None, -1):
        chosen["top_k"] = options["top_k"]
    return {name: value for name, value in chosen.items() if value is not None}
