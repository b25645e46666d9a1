"""Our protobuf messages to the runtime's types and back. The runtime checks ranges; here only what the wire adds."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any, cast

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from dcut_server.generated.dcut.v1 import dcut_pb2
from dcut_server.outbox import Parcel
from dcut_trt.errors import InvalidRequest
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.tokenizer import Tokenizer
from dcut_trt.types import FinishReason, Request, SamplingParams, TokenLogprob, Usage

MAX_REQUEST_ID = 128
MAX_STOP_TOKEN_IDS = 1024
MAX_STREAMS = 16
OPTIONAL_FIELDS = ("min_tokens", "logprobs", "priority", "skip_special_tokens")

FINISH_TO_PROTO = {
    FinishReason.STOP: dcut_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: dcut_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: dcut_pb2.FINISH_REASON_ABORTED,
}
FINISH_FROM_PROTO = {value: key for key, value in FINISH_TO_PROTO.items()}


def request_from_proto(
    message: dcut_pb2.GenerateRequest, tokenizer: Tokenizer, max_len: int, deadline: float | None
) -> Request:
    """A request for the engine; tokenizes, so it may take milliseconds.

    max_len: stands in for an unset max_tokens (the engine cuts at the context limit).
    deadline: seconds on the monotonic clock.  Raises InvalidRequest, UnsupportedOption.
    """
    for field, part in (("request", message), ("sampling", message.sampling)):
        refuse_unknown_fields(field, part)
    if len(message.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stop_token_ids", f"{len(message.stop_token_ids)} ids", f"must be at most {MAX_STOP_TOKEN_IDS}"
        )
    return Request(
        request_id=request_id_from_proto(message.request_id),
        prompt_ids=tuple(_prompt_ids(message, tokenizer)),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else max_len,
        sampling=sampling_from_proto(message.sampling),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        deadline=deadline,
        **{name: getattr(message, name) for name in OPTIONAL_FIELDS if message.HasField(name)},
    )


def streams_from_proto(message: dcut_pb2.GenerateRequest) -> int:
    """How many streams the call asks for. Raises InvalidRequest."""
    return check_streams("n", message.n if message.HasField("n") else 1)


def check_streams(field: str, count: int) -> int:
    if not 1 <= count <= MAX_STREAMS:
        raise InvalidRequest(field, count, f"must be in [1, {MAX_STREAMS}]")
    return count


def request_id_from_proto(request_id: str) -> str:
    """The caller's id, or a new one for an empty string. Raises InvalidRequest for one that is too long."""
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidRequest(
            "request_id", f"{request_id[:16]}...", f"has {len(request_id)} characters; must be at most {MAX_REQUEST_ID}"
        )
    return request_id or uuid.uuid4().hex


def sampling_from_proto(message: dcut_pb2.Sampling) -> SamplingParams:
    """Set fields replace the defaults, also when set to zero."""
    fields: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    if "logit_bias" in fields:
        fields["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    return SamplingParams(**fields)


def refuse_unknown_fields(field: str, message: Message) -> None:
    # protobuf keeps what it does not know and says nothing: an option of a newer client would be silently ignored.
    unknown = sorted({entry.field_number for entry in cast(Any, UnknownFieldSet(message))})
    if unknown:
        raise InvalidRequest(field, f"field numbers {unknown}", "unknown to this server's version of the contract")


def _prompt_ids(message: dcut_pb2.GenerateRequest, tokenizer: Tokenizer) -> list[int]:
    match message.WhichOneof("input"):
        case "token_ids":
            return list(message.token_ids.ids)
        case "text":
            return tokenizer.encode(message.text)
        case "chat":
            if not message.chat.messages:
                raise InvalidRequest("chat.messages", [], "must hold at least 1 message")
            messages = [{"role": turn.role, "content": turn.content} for turn in message.chat.messages]
            return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
        case _:
            raise InvalidRequest("input", None, "must be one of text, token_ids, chat")


def parcel_to_proto(request_id: str, parcel: Parcel, index: int = 0) -> dcut_pb2.GenerateResponse:
    """One message of stream `index`; finish_reason, what it stopped at, and usage only on the last."""
    message = dcut_pb2.GenerateResponse(
        request_id=request_id,
        token_ids=parcel.tokens,
        text=parcel.text,
        steps=parcel.steps,
        index=index,
        logprobs=[logprob_to_proto(entry) for entry in parcel.logprobs],
    )
    if parcel.finish is not None:
        assert parcel.usage is not None, "a final event carries usage"
        message.finish_reason = FINISH_TO_PROTO[parcel.finish]
        message.usage.CopyFrom(usage_to_proto(parcel.usage))
        match parcel.matched:
            case str(text):
                message.matched_stop_string = text
            case int(token_id):
                message.matched_token_id = token_id
    return message


def matched_from_proto(message: dcut_pb2.GenerateResponse) -> str | int | None:
    """The stop string, stop id or end-of-sequence id of a last message; None where there is none."""
    field = message.WhichOneof("matched_stop")
    return None if field is None else cast("str | int", getattr(message, field))


def logprob_to_proto(entry: TokenLogprob) -> dcut_pb2.TokenLogprob:
    top = [dcut_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return dcut_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top)


def logprob_from_proto(message: dcut_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, tuple((top.token_id, top.logprob) for top in message.top))


def usage_to_proto(usage: Usage) -> dcut_pb2.Usage:
    return dcut_pb2.Usage(**dataclasses.asdict(usage))


def usage_from_proto(message: dcut_pb2.Usage) -> Usage:
    return Usage(**{field.name: getattr(message, field.name) for field in dataclasses.fields(Usage)})


def cost_table_to_proto(table: CostTable | None) -> dcut_pb2.GetCostTableResponse:
    """All rows of the table; without one, only the state "missing"."""
    if table is None:
        return dcut_pb2.GetCostTableResponse(state="missing")
    plain_ms = [None] * len(table.batches) if table.plain_ms is None else table.plain_ms.tolist()
    rows = [
        dcut_pb2.CostRow(batch=batch, cost_ms=costs, plain_ms=plain)
        for batch, costs, plain in zip(table.batches, table.cost_ms.tolist(), plain_ms, strict=True)
    ]
    return dcut_pb2.GetCostTableResponse(
        state=table.state,
        fingerprint=table.fingerprint,
        measured_at=table.measured_at,
        ratios=table.ratios,
        rows=rows,
    )
