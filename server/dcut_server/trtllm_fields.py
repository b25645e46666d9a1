"""Which fields of a trtllm.GenerateRequest are served; others are refused by name unless they ask for nothing."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from dcut_server.convert import refuse_unknown_fields
from dcut_trt.errors import InvalidRequest

SERVED: dict[str, frozenset[str]] = {
    "GenerateRequest": frozenset(
        {
            "request_id",
            "tokenized",
            "sampling_config",
            "output_config",
            "max_tokens",
            "streaming",
            "arrival_time",  # repeated in the performance metrics
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "include_stop_token_in_output",
        }
    ),
    "TokenizedInput": frozenset({"original_text", "input_token_ids"}),  # the text is for logs only, says the contract
    "SamplingConfig": frozenset(
        {
            "num_return_sequences",
            "top_k",
            "top_p",
            "seed",
            "temperature",
            "min_tokens",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "min_p",
        }
    ),
    # The output never holds the prompt, which is what TensorRT-LLM does for both values of exclude_input_from_output.
    "OutputConfig": frozenset({"logprobs", "exclude_input_from_output", "return_perf_metrics"}),
}

NEUTRAL: dict[str, tuple[float, ...]] = {
    "beam_width": (0, 1),
    "beam_search_diversity_rate": (0.0,),
    "early_stopping": (0, 1),  # of beam search, as is the next
    "length_penalty": (0.0, 1.0),
    "no_repeat_ngram_size": (0,),
    "prompt_ignore_length": (0,),
    "prompt_logprobs": (0,),
    "top_p_decay": (1.0,),
    "top_p_min": (0.0,),
}
"""Values of fields that are not served which ask for nothing, beside an empty message."""

SHOWN = 40


def refuse_unserved(message: Any) -> None:
    """Raises InvalidRequest naming the first set field of a GenerateRequest that would otherwise be ignored."""
    _refuse("", message)


def _refuse(path: str, message: Message) -> None:
    refuse_unknown_fields(path.rstrip(".") or "request", message)
    served = SERVED[message.DESCRIPTOR.name]
    for field, value in message.ListFields():
        if field.name not in served:
            if not _asks_for_nothing(field.name, value):
                raise InvalidRequest(f"{path}{field.name}", _shown(value), _limit(field.name))
        elif field.message_type is not None:
            _refuse(f"{path}{field.name}.", value)


def _asks_for_nothing(name: str, value: Any) -> bool:
    if isinstance(value, Message):
        return not value.ListFields() and not value.SerializeToString()
    return name in NEUTRAL and value in NEUTRAL[name]


def _limit(name: str) -> str:
    if name in NEUTRAL:
        return f"is not supported by this server; leave it unset, or {' or '.join(map(str, NEUTRAL[name]))}"
    return "is not supported by this server; leave it unset"


def _shown(value: Any) -> object:
    if isinstance(value, bool | int | float):
        return value
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
