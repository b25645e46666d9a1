"""Triton's tensors to a dcut.v1 request, and dcut.v1 messages to Triton's tensors; free of Triton's own modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcut_server.generated.dcut.v1 import dcut_pb2

PREFIX = "sampling_param_"
REQUEST_SCALARS = ("max_tokens", "min_tokens", "ignore_eos")
REQUEST_LISTS = ("stop", "stop_token_ids")
SAMPLING_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INPUTS = ("text_input", "streaming", *(PREFIX + name for name in REQUEST_SCALARS + REQUEST_LISTS + SAMPLING_SCALARS))
FINISH_REASONS = {
    dcut_pb2.FINISH_REASON_STOP: "stop",
    dcut_pb2.FINISH_REASON_LENGTH: "length",
    dcut_pb2.FINISH_REASON_ABORTED: "aborted",
}


class TensorRefused(ValueError):
    """A tensor's value cannot be sent on; the message names tensor, value and limit."""

    def __init__(self, name: str, value: Any, limit: str) -> None:
        super().__init__(f"{name}={value!r}: {limit}")


def request_from_tensors(tensors: Mapping[str, NDArray[Any]]) -> tuple[dcut_pb2.GenerateRequest, bool]:
    """The request to send, and whether its answer is streamed. Tensors that are absent stay unset.

    The server checks ranges; refused here is what a protobuf field cannot say. Raises TensorRefused.
    """
    if "text_input" not in tensors:
        raise TensorRefused("text_input", None, "must be given")
    message = dcut_pb2.GenerateRequest(text=_text("text_input", _scalar("text_input", tensors["text_input"])))
    for name, value in tensors.items():
        field = name.removeprefix(PREFIX)
        if field in SAMPLING_SCALARS:
            _assign(message.sampling, field, name, _scalar(name, value))
        elif name.startswith(PREFIX) and field in REQUEST_SCALARS:
            _assign(message, field, name, _scalar(name, value))
        elif name.startswith(PREFIX) and field in REQUEST_LISTS:
            values = [_text(name, item) if isinstance(item, bytes | str) else item for item in value.ravel().tolist()]
            getattr(message, field).extend(values)
    streaming = bool(_scalar("streaming", tensors["streaming"])) if "streaming" in tensors else False
    return message, streaming


def refuse_parameters(parameters: Mapping[str, Any]) -> None:
    """The generate extension turns fields that are no inputs into request parameters, which nothing would read.

    Raises TensorRefused.
    """
    for name, value in parameters.items():
        if not name.startswith("triton_"):
            raise TensorRefused(name, value, f"is not an input of this model; those are {', '.join(INPUTS)}")


def _scalar(name: str, tensor: NDArray[Any]) -> Any:
    if tensor.size != 1:
        raise TensorRefused(name, list(tensor.shape), "the shape must hold exactly 1 value")
    value = tensor.ravel().tolist()[0]
    if isinstance(value, float) and not np.isfinite(value):
        raise TensorRefused(name, value, "must be finite")
    return value


def _text(name: str, value: Any) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise TensorRefused(name, value[:64], f"must be UTF-8; {error.reason} at byte {error.start}") from None


def _assign(message: Any, field: str, name: str, value: Any) -> None:
    try:
        setattr(message, field, value)
    except (TypeError, ValueError):
        kind = message.DESCRIPTOR.fields_by_name[field].cpp_type
        wanted = "a 64-bit integer" if kind == message.DESCRIPTOR.fields_by_name[field].CPPTYPE_INT64 else "a number"
        raise TensorRefused(name, value, f"must be {wanted}") from None


def tensors_from_messages(messages: Sequence[dcut_pb2.GenerateResponse]) -> dict[str, NDArray[Any]]:
    """What one Triton response holds: the text and ids of these messages; totals when the last one is the stream's."""
    tensors: dict[str, NDArray[Any]] = {
        "text_output": np.array(["".join(message.text for message in messages).encode()], object),
        "output_ids": np.array([token for message in messages for token in message.token_ids], np.int32),
    }
    if is_last(messages[-1]):
        usage = messages[-1].usage
        rate = usage.accepted / usage.verified if usage.verified else 0.0
        tensors["finish_reason"] = np.array([FINISH_REASONS[messages[-1].finish_reason].encode()], object)
        tensors["acceptance_rate"] = np.array([rate], np.float32)
        tensors["total_accepted_draft_tokens"] = np.array([usage.accepted], np.int32)
        tensors["total_draft_tokens"] = np.array([usage.verified], np.int32)
    return tensors


def is_last(message: dcut_pb2.GenerateResponse) -> bool:
    """Whether a message ends its stream."""
    return bool(message.finish_reason != dcut_pb2.FINISH_REASON_UNSPECIFIED)
