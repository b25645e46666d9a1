"""Calls of trtllm.TrtllmService as a gateway makes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from smg_grpc_proto.generated import trtllm_service_pb2, trtllm_service_pb2_grpc

MAX_TOKENS = 40


@asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield trtllm_service_pb2_grpc.TrtllmServiceStub(channel)


def message(
    prompt: Sequence[int],
    *,
    sampling: dict[str, Any] | None = None,
    output: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """A greedy streaming request, unless told otherwise."""
    return trtllm_service_pb2.GenerateRequest(
        tokenized=trtllm_service_pb2.TokenizedInput(input_token_ids=prompt),
        sampling_config=trtllm_service_pb2.SamplingConfig(**{"beam_width": 1, "temperature": 0.0, **(sampling or {})}),
        output_config=trtllm_service_pb2.OutputConfig(exclude_input_from_output=True, **(output or {})),
        **{"max_tokens": MAX_TOKENS, "streaming": True, **fields},
    )


@dataclass
class Answer:
    """What came for one sequence index."""

    chunks: list[Any] = field(default_factory=list)
    completes: list[Any] = field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        """Of the only complete; those of the chunks, where there are any, must be the same, and their counts agree."""
        (complete,) = self.completes
        ids = tuple(complete.output_token_ids)
        if self.chunks:
            assert tuple(token for chunk in self.chunks for token in chunk.token_ids) == ids
            assert [entry for chunk in self.chunks for entry in chunk.logprobs] == list(complete.logprobs)
        return ids


async def answers(stub: Any, request: Any) -> list[Answer]:
    """One per sequence, by index; nothing follows a sequence's complete."""
    found: dict[int, Answer] = {}
    async for reply in stub.Generate(request):
        kind = reply.WhichOneof("response")
        part = getattr(reply, kind)
        answer = found.setdefault(part.sequence_index, Answer())
        assert not answer.completes
        (answer.chunks if kind == "chunk" else answer.completes).append(part)
    assert sorted(found) == list(range(len(found)))
    return [found[index] for index in sorted(found)]


async def answer(stub: Any, request: Any) -> Answer:
    (only,) = await answers(stub, request)
    return only
