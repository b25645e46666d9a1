"""The client library: an async client, and a helper for one prompt without asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias, TypedDict, Unpack

import grpc

from dcut_server import convert
from dcut_server.generated.dcut.v1 import dcut_pb2, dcut_pb2_grpc
from dcut_server.ops.channel import ClientTls, open_channel, with_token
from dcut_trt.errors import DcutError, InvalidRequest
from dcut_trt.types import FinishReason, TokenLogprob, Usage

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages with "role" and "content"."""


class CallFailed(DcutError):
    """The server ended a call with a status. code: such as grpc.StatusCode.INVALID_ARGUMENT.  details: its message."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class GenerateOptions(TypedDict, total=False):
    """Options of one request, all optional; dcut.proto has their ranges and defaults."""

    request_id: str
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int
    n: int
    priority: int
    skip_special_tokens: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]


SAMPLING_FIELDS = frozenset(dcut_pb2.Sampling.DESCRIPTOR.fields_by_name)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of a stream. steps: engine steps behind it.  logprobs: one per token id when asked for.

    index: which of the n streams.  finish, usage, matched (what a STOP stopped at): on a stream's last one only.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    steps: int
    finish: FinishReason | None
    usage: Usage | None
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    matched: str | int | None = None


class DcutClient:
    """`async with DcutClient("127.0.0.1:50051") as client: async for chunk in client.generate("Hi"): ...`

    Every method raises CallFailed when the server answers with an error status.
    """

    def __init__(
        self,
        address: str,
        options: Sequence[tuple[str, Any]] = (),
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
    ) -> None:
        self._channel = open_channel(address, options, tls, token)
        self._stub = with_token(dcut_pb2_grpc.DcutServiceStub(self._channel), token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def generate(
        self, prompt: Prompt, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Stream one answer. Leaving the iteration early cancels the request on the server."""
        call = self._stub.Generate(build_request(prompt, **options), timeout=timeout_s)
        try:
            async for message in call:
                yield _chunk(message)
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None
        finally:
            call.cancel()

    async def complete(
        self, prompt: Prompt, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """The whole answer at once. Raises InvalidRequest for n > 1: generate() tells the streams apart."""
        if options.get("n", 1) != 1:
            raise InvalidRequest("n", options["n"], "complete() returns one answer; use generate()")
        chunks = [chunk async for chunk in self.generate(prompt, timeout_s, **options)]
        return _completion(chunks)

    async def info(self) -> dcut_pb2.GetInfoResponse:
        reply: dcut_pb2.GetInfoResponse = await self._unary(self._stub.GetInfo, dcut_pb2.GetInfoRequest())
        return reply

    async def cost_table(self) -> dcut_pb2.GetCostTableResponse:
        reply: dcut_pb2.GetCostTableResponse = await self._unary(
            self._stub.GetCostTable, dcut_pb2.GetCostTableRequest()
        )
        return reply

    async def abort(self, request_id: str) -> bool:
        """End a live request; False when the id names none."""
        reply = await self._unary(self._stub.Abort, dcut_pb2.AbortRequest(request_id=request_id))
        return bool(reply.found)

    @staticmethod
    async def _unary(method: Callable[[Any], Any], request: Any) -> Any:
        try:
            return await method(request)
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None


def complete(
    address: str, prompt: Prompt, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
) -> Completion:
    """One answer from the server at `address`, for callers without an event loop. Raises CallFailed."""

    async def run() -> Completion:
        async with DcutClient(address) as client:
            return await client.complete(prompt, timeout_s, **options)

    return asyncio.run(run())


def build_request(prompt: Prompt, **options: Unpack[GenerateOptions]) -> dcut_pb2.GenerateRequest:
    """The message of one request; options that are not given stay unset.

    Raises InvalidRequest for a value that has no place on the wire, such as an integer past 64 bits.
    """
    fields: dict[str, Any] = {name: value for name, value in options.items() if name not in SAMPLING_FIELDS}
    sampling: dict[str, Any] = {name: value for name, value in options.items() if name in SAMPLING_FIELDS}
    if isinstance(prompt, str):
        fields["text"] = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        fields["chat"] = {"messages": prompt}
    else:
        fields["token_ids"] = {"ids": prompt}
    try:
        return dcut_pb2.GenerateRequest(**fields, sampling=dcut_pb2.Sampling(**sampling))
    except (TypeError, ValueError) as error:
        raise InvalidRequest("options", dict(options), f"cannot be sent: {error}") from error


def _chunk(message: Any) -> Chunk:
    return Chunk(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        text=message.text,
        steps=message.steps,
        finish=convert.FINISH_FROM_PROTO.get(message.finish_reason),
        usage=convert.usage_from_proto(message.usage) if message.HasField("usage") else None,
        logprobs=tuple(convert.logprob_from_proto(entry) for entry in message.logprobs),
        index=message.index,
        matched=convert.matched_from_proto(message),
    )


def _completion(chunks: Sequence[Chunk]) -> Completion:
    last = chunks[-1] if chunks else None
    if last is None or last.finish is None or last.usage is None:
        raise CallFailed(grpc.StatusCode.DATA_LOSS, "the stream ended without its final message")
    return Completion(
        request_id=last.request_id,
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        text="".join(chunk.text for chunk in chunks),
        finish=last.finish,
        usage=last.usage,
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        matched=last.matched,
    )


def _failure(error: grpc.aio.AioRpcError) -> CallFailed:
    return CallFailed(error.code(), error.details() or "")
