"""The servicer of trtllm.TrtllmService, the protocol of gateways in front of TensorRT-LLM."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, trtllm_service_pb2

from dcut_server import trtllm_convert
from dcut_server.dcut_service import deadline_of, with_status
from dcut_server.fan_out import fan_out
from dcut_server.host import EngineHost
from dcut_server.tokenizer_archive import chunks, tokenizer_zip

SERVICE_NAME: str = trtllm_service_pb2.DESCRIPTOR.services_by_name["TrtllmService"].full_name


class TrtllmServicer:
    """Thin, as DcutServicer. Cancelling a call ends its request; so does Abort, the only sign some gateways give."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    @with_status
    async def Generate(self, message: Any, context: Any) -> None:  # noqa: N802 - the names are the contract's
        """Streaming: a chunk per engine step. Always: one complete per stream."""
        async with AsyncExitStack() as stack:
            with self._host.admission():
                self._host.require_serving()
                call = trtllm_convert.call_from_proto(message, deadline_of(context))
                parcels = await stack.enter_async_context(fan_out(self._host, call.request, call.streams))
            outputs = [trtllm_convert.Output(call, index) for index in range(call.streams)]
            request_id = call.request.request_id
            async for index, parcel in parcels:
                chunk = outputs[index].add(parcel)
                if call.streaming and chunk is not None:
                    await context.write(trtllm_service_pb2.GenerateResponse(request_id=request_id, chunk=chunk))
                if parcel.finish is not None:
                    complete = outputs[index].complete()
                    await context.write(trtllm_service_pb2.GenerateResponse(request_id=request_id, complete=complete))

    @with_status
    async def Abort(self, message: Any, _context: Any) -> Any:  # noqa: N802
        """Never an error; success tells whether the id named a live request."""
        found = self._host.abort(message.request_id)
        text = f"request {message.request_id} {'aborted' if found else 'not found'}"
        return trtllm_service_pb2.AbortResponse(success=found, message=text)

    @with_status
    async def HealthCheck(self, _message: Any, _context: Any) -> Any:  # noqa: N802
        """UNAVAILABLE unless it serves: a caller may look at the code alone."""
        self._host.require_serving()
        return trtllm_service_pb2.HealthCheckResponse(status="OK")

    @with_status
    async def GetModelInfo(self, _message: Any, _context: Any) -> Any:  # noqa: N802
        identity = self._host.identity
        return trtllm_service_pb2.GetModelInfoResponse(
            model_id=identity.target,
            max_input_len=identity.max_len - 1,
            max_seq_len=identity.max_len,
            max_batch_size=identity.max_batch,
            vocab_size=identity.vocab_size,
            hidden_size=identity.hidden_size,
            num_layers=identity.layers,
            num_heads=identity.heads,
        )

    @with_status
    async def GetServerInfo(self, _message: Any, _context: Any) -> Any:  # noqa: N802
        return trtllm_service_pb2.GetServerInfoResponse(
            version=version("dcut-trt"),
            backend=self._host.identity.backend,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            context_parallel_size=1,
            world_size=1,
        )

    @with_status
    async def GetTokenizer(self, _message: Any, context: Any) -> None:  # noqa: N802
        engine = self._host.require_engine()
        data = await asyncio.to_thread(tokenizer_zip, engine.tokenizer, engine.limits.max_len)
        parts = chunks(data)
        digest = hashlib.sha256(data).hexdigest()
        for number, part in enumerate(parts, start=1):
            sha256 = digest if number == len(parts) else ""
            await context.write(common_pb2.GetTokenizerChunk(data=part, sha256=sha256))

    async def Embed(self, _message: Any, context: Any) -> None:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Embed: this server generates text; it serves no embeddings")

    async def SubscribeKvEvents(self, _message: Any, context: Any) -> None:  # noqa: N802
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "SubscribeKvEvents: this server publishes no events of its KV cache"
        )
