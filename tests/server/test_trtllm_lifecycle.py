"""The other calls of trtllm.TrtllmService, and what happens to requests that are cut short."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from live_server import encoded, identity_of, nothing_left, run, serving, until
from smg_grpc_proto.generated import common_pb2, trtllm_service_pb2
from transformers import AutoTokenizer
from trtllm_calls import answer, message, stub_of

from dcut_server.lifecycle import DcutServer
from dcut_server.tokenizer_archive import CHUNK_BYTES, tokenizer_zip
from dcut_trt.backends.scripted import byte_tokenizer, scripted_engine
from dcut_trt.manifest import read_manifest
from dcut_trt.tokenizer import Tokenizer

ENDLESS = {"ignore_eos": True, "max_tokens": 4000}


def abort(request_id: str) -> Any:
    return trtllm_service_pb2.AbortRequest(request_id=request_id)


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize("sequences", [1, 3])
def test_abort_ends_all_sequences_and_is_no_error_twice_or_for_a_stranger(sequences: int) -> None:
    async def test() -> None:
        engine = scripted_engine(max_len=4096, delay_s=0.002)
        async with serving(engine) as (server, client), stub_of(server.address) as stub:
            call = stub.Generate(
                message([1, 2], request_id="x", sampling={"num_return_sequences": sequences}, **ENDLESS)
            )
            await until(lambda: engine.running == sequences)
            assert (await stub.Abort(abort("x"))).success
            ends = [reply.complete.finish_reason async for reply in call if reply.HasField("complete")]
            assert ends == ["cancelled"] * sequences
            for stranger in ("x", "never seen"):
                reply = await stub.Abort(abort(stranger))
                assert (reply.success, stranger in reply.message) == (False, True)
            await until(lambda: nothing_left(server, engine))
            gauges = (await client.info()).gauges
            assert (gauges.running, gauges.waiting) == (0, 0)

    run(test)


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_cancelled_call_frees_its_slots(sequences: int) -> None:
    async def test() -> None:
        engine = scripted_engine(max_len=4096, delay_s=0.002)
        async with serving(engine) as (server, client), stub_of(server.address) as stub:
            call = stub.Generate(
                message([1, 2], request_id="x", sampling={"num_return_sequences": sequences}, **ENDLESS)
            )
            await call.read()
            assert (await client.info()).gauges.running == sequences
            call.cancel()
            await until(lambda: nothing_left(server, engine))
            assert (await client.info()).gauges.running == 0
            again = message([1, 2], request_id="x", max_tokens=3, ignore_eos=True)
            assert len((await answer(stub, again)).ids) == 3

    run(test)


def test_a_live_id_is_refused_across_both_services() -> None:
    async def test() -> None:
        engine = scripted_engine(max_len=4096, delay_s=0.002)
        async with serving(engine) as (server, client), stub_of(server.address) as stub:
            call = stub.Generate(message([1, 2], request_id="same", **ENDLESS))
            await until(lambda: engine.running == 1)
            for sequences in (1, 2):
                other = message([3], request_id="same", sampling={"num_return_sequences": sequences})
                code, details = await code_of(stub.Generate(other))
                assert (code, "same" in details) == (grpc.StatusCode.ALREADY_EXISTS, True)
            assert await client.abort("same")
            assert [reply async for reply in call][-1].complete.finish_reason == "cancelled"
            await until(lambda: nothing_left(server, engine))

    run(test)


def test_health_tells_whether_it_serves() -> None:
    async def test() -> None:
        engine = scripted_engine()
        server = DcutServer(identity_of(engine))
        await server.bind()
        async with stub_of(server.address) as stub:
            health = trtllm_service_pb2.HealthCheckRequest()
            loading = (grpc.StatusCode.UNAVAILABLE, "the server is loading; it takes no new requests")
            assert await code_of(stub.HealthCheck(health)) == loading
            assert await code_of(stub.Generate(message([1]))) == loading
            assert (await code_of(stub.GetTokenizer(common_pb2.GetTokenizerRequest())))[0] is loading[0]
            assert not (await stub.Abort(abort("x"))).success
            await server.open(lambda _report: engine)
            assert (await stub.HealthCheck(health)).status == "OK"
        await server.shut_down(0.0, asyncio.Event())

    run(test)


def test_model_and_server_info() -> None:
    async def test() -> None:
        async with serving(scripted_engine(max_len=96)) as (server, _), stub_of(server.address) as stub:
            model = await stub.GetModelInfo(trtllm_service_pb2.GetModelInfoRequest())
            sizes = (model.max_input_len, model.max_seq_len, model.max_batch_size, model.vocab_size)
            assert (model.model_id, sizes) == ("scripted target", (95, 96, 8, 258))
            info = await stub.GetServerInfo(trtllm_service_pb2.GetServerInfoRequest())
            assert (info.backend, info.tensor_parallel_size, info.world_size) == ("scripted", 1, 1)
            assert info.version

    run(test)


def test_what_is_not_implemented_says_so() -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (server, _), stub_of(server.address) as stub:
            for call, word in (
                (stub.Embed(trtllm_service_pb2.EmbedRequest()), "Embed"),
                (stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()), "SubscribeKvEvents"),
            ):
                code, details = await code_of(call)
                assert (code, word in details) == (grpc.StatusCode.UNIMPLEMENTED, True)

    run(test)


def test_reflection_lists_the_service() -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            reply = await call.read()
            names = {service.name for service in reply.list_services_response.service}
            assert {"trtllm.TrtllmService", "dcut.v1.DcutService"} <= names

    run(test)


def load_zip(data: bytes, directory: Path) -> Any:
    zipfile.ZipFile(io.BytesIO(data)).extractall(directory)
    return AutoTokenizer.from_pretrained(directory)


def test_the_tokenizer_comes_in_chunks_with_its_digest(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(scripted_engine()) as (server, _), stub_of(server.address) as stub:
            parts = [part async for part in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        data = b"".join(part.data for part in parts)
        assert [part.sha256 for part in parts] == [""] * (len(parts) - 1) + [hashlib.sha256(data).hexdigest()]
        assert tuple(load_zip(data, tmp_path)("naïve 日本", add_special_tokens=False).input_ids) == encoded(
            "naïve 日本"
        )

    run(test)


def same_everywhere(tokenizer: Tokenizer) -> Callable[[Any], None]:
    def check(loaded: Any) -> None:
        for text in ("Hello, world", "naïve café 日本語 👩‍👩‍👧‍👦", "a  b\n\tc", "<|im_start|>user"):
            assert loaded(text).input_ids == tokenizer.encode(text)
        messages = [{"role": "user", "content": "Hi é"}]
        rendered = loaded.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert rendered == tokenizer.render_chat(messages)
        assert loaded.eos_token_id == tokenizer.eos_ids[0]

    return check


def test_transformers_reads_the_zip_of_smollm2_and_of_the_byte_tokenizer(
    smollm2_bundle_fp32: Path, tmp_path: Path
) -> None:
    smollm2 = Tokenizer.load(smollm2_bundle_fp32, read_manifest(smollm2_bundle_fp32).tokenizer)
    for name, tokenizer in (("smollm2", smollm2), ("bytes", byte_tokenizer())):
        data = tokenizer_zip(tokenizer, 512)
        assert data == tokenizer_zip(tokenizer, 512)
        same_everywhere(tokenizer)(load_zip(data, tmp_path / name))
    assert len(tokenizer_zip(smollm2, 512)) > CHUNK_BYTES
