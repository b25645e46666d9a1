"""TLS, mutual TLS, bearer tokens and limits, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live_server import run
from operated import operated
from smg_grpc_proto import trtllm_service_pb2 as trtllm_pb2
from smg_grpc_proto import trtllm_service_pb2_grpc as trtllm_grpc

from dcut_server.client import CallFailed, DcutClient
from dcut_server.ops.channel import ClientTls
from dcut_server.ops.transport import Transport
from dcut_server.serve_options import ServeOptions
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.errors import UnsupportedOption

TOKEN = "a-token-of-operator-one"
OTHER = "another-token-of-operator-two"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ours")


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"{TOKEN}\n\n{OTHER}\n")
    return path


async def code_of(call: Awaitable[Any]) -> grpc.StatusCode:
    with pytest.raises(CallFailed) as caught:
        await call
    assert TOKEN not in caught.value.details
    return caught.value.code


def ask(client: DcutClient) -> Awaitable[Any]:
    return client.complete("hello", timeout_s=10, max_tokens=4, ignore_eos=True)


def test_tls_serves_who_trusts_the_certificate_and_no_one_in_plain_text(authority: Authority, tmp_path: Path) -> None:
    async def test() -> None:
        pair = authority.issue("server")
        options = ServeOptions(port=0, tls_cert=pair.cert, tls_key=pair.key)
        stranger = Authority(tmp_path, "stranger")
        async with operated(scripted_engine(), options) as running:
            address = running.server.address
            async with DcutClient(address, tls=ClientTls(authority.ca)) as client:
                assert len((await ask(client)).token_ids) == 4
            async with DcutClient(address, tls=ClientTls(stranger.ca)) as client:
                assert await code_of(ask(client)) is grpc.StatusCode.UNAVAILABLE
            async with DcutClient(address) as client:
                assert await code_of(ask(client)) is grpc.StatusCode.UNAVAILABLE

    run(test)


def test_mutual_tls_refuses_callers_without_a_certificate_of_ours(authority: Authority, tmp_path: Path) -> None:
    async def test() -> None:
        pair, ours = authority.issue("server"), authority.issue("caller")
        foreign = Authority(tmp_path, "stranger").issue("caller")
        options = ServeOptions(port=0, tls_cert=pair.cert, tls_key=pair.key, tls_client_ca=authority.ca)
        async with operated(scripted_engine(), options) as running:
            address = running.server.address
            async with DcutClient(address, tls=ClientTls(authority.ca, ours.cert, ours.key)) as client:
                assert len((await ask(client)).token_ids) == 4
            for tls in (ClientTls(authority.ca), ClientTls(authority.ca, foreign.cert, foreign.key)):
                async with DcutClient(address, tls=tls) as client:
                    assert await code_of(ask(client)) is grpc.StatusCode.UNAVAILABLE
            assert not running.finals[1:], "nothing of the refused calls reached the engine"

    run(test)


def test_every_service_but_health_asks_for_a_token(token_file: Path) -> None:
    async def test() -> None:
        async with operated(scripted_engine(), ServeOptions(port=0, auth_token_file=token_file)) as running:
            address = running.server.address
            for token in (TOKEN, OTHER):
                async with DcutClient(address, token=token) as client:
                    assert len((await ask(client)).token_ids) == 4
                    assert (await client.info()).version
            for wrong in (None, "", TOKEN[:-1], TOKEN + "x", "x" * 5000, f"{TOKEN} {OTHER}"):
                async with DcutClient(address, token=wrong) as client:
                    assert await code_of(ask(client)) is grpc.StatusCode.UNAUTHENTICATED
                    assert await code_of(client.info()) is grpc.StatusCode.UNAUTHENTICATED
                    assert await code_of(client.abort("x")) is grpc.StatusCode.UNAUTHENTICATED
            async with grpc.aio.insecure_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest())
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert len(running.finals) == 2

    run(test)


def test_the_trtllm_service_asks_for_a_token_too(token_file: Path) -> None:
    async def test() -> None:
        async with (
            operated(scripted_engine(), ServeOptions(port=0, auth_token_file=token_file)) as running,
            grpc.aio.insecure_channel(running.server.address) as channel,
        ):
            stub = trtllm_grpc.TrtllmServiceStub(channel)
            request = trtllm_pb2.GenerateRequest(
                request_id="r", tokenized=trtllm_pb2.TokenizedInput(input_token_ids=[1, 2]), max_tokens=3
            )
            request.sampling_config.num_return_sequences = 1
            for metadata in ((), (("authorization", "Basic " + TOKEN),)):
                for call in (
                    stub.GetModelInfo(trtllm_pb2.GetModelInfoRequest(), metadata=metadata),
                    stub.Generate(request, metadata=metadata).read(),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            bearer = (("authorization", f"bearer {TOKEN}"),)
            assert (await stub.GetModelInfo(trtllm_pb2.GetModelInfoRequest(), metadata=bearer)).vocab_size == 258

    run(test)


def test_a_request_past_the_message_limit_is_refused_and_others_go_on() -> None:
    async def test() -> None:
        engine = scripted_engine(max_len=4096, delay_s=0.001)
        async with (
            operated(engine, ServeOptions(port=0, max_message_mib=1)) as running,
            DcutClient(running.server.address) as client,
        ):
            live = asyncio.create_task(client.complete("live", max_tokens=200, ignore_eos=True))
            assert await code_of(client.complete("x" * (1 << 20))) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await code_of(client.complete("x" * (1 << 19))) is grpc.StatusCode.INVALID_ARGUMENT
            assert len((await live).token_ids) == 200

    run(test)


def test_one_connection_has_so_many_streams_at_once() -> None:
    async def test() -> None:
        engine = scripted_engine(delay_s=0.003)
        most: list[int] = []
        engine.trace.listeners.append(lambda record, _commits: most.append(record.batch))
        async with (
            operated(engine, ServeOptions(port=0, max_concurrent_streams=2)) as running,
            DcutClient(running.server.address) as client,
        ):
            calls = [client.complete(f"{index}", max_tokens=20, ignore_eos=True) for index in range(6)]
            answers = await asyncio.gather(*calls)
        assert [len(answer.token_ids) for answer in answers] == [20] * 6
        assert max(most) <= 2

    run(test)


Fault = tuple[Callable[[Path, Authority], dict[str, Any]], str]


def _file(folder: Path, text: str) -> Path:
    path = folder / "file"
    path.write_text(text)
    return path


FAULTS: dict[str, Fault] = {
    "missing certificate": (
        lambda d, a: {"tls_cert": d / "none.pem", "tls_key": a.issue("x").key},
        "tls_cert=.*none.pem: No such file",
    ),
    "missing key": (
        lambda d, a: {"tls_cert": a.issue("x").cert, "tls_key": d / "none.key"},
        "tls_key=.*none.key: No such file",
    ),
    "key of another": (
        lambda d, a: {"tls_cert": a.issue("x").cert, "tls_key": a.issue("y").key},
        "tls_cert=.* tls_key=.*: the key does not belong to the certificate",
    ),
    "no certificate": (
        lambda d, a: {"tls_cert": _file(d, "text"), "tls_key": a.issue("x").key},
        "tls_cert=.* tls_key=.*: not a PEM certificate",
    ),
    "no authority": (
        lambda d, a: {"tls_cert": (p := a.issue("x")).cert, "tls_key": p.key, "tls_client_ca": _file(d, "text")},
        "tls_client_ca=.*: holds no PEM certificate",
    ),
    "missing tokens": (lambda d, a: {"auth_token_file": d / "none"}, "auth_token_file=.*none: No such file"),
    "no token": (lambda d, a: {"auth_token_file": _file(d, "\n\n")}, "holds no token"),
    "short token": (lambda d, a: {"auth_token_file": _file(d, f"{TOKEN}\nsecret")}, "line 2 is no token; .*16 to 4096"),
    "spaced token": (lambda d, a: {"auth_token_file": _file(d, "a token that has spaces")}, "line 1 is no token"),
    "plain text abroad": (
        lambda d, a: {"auth_token_file": _file(d, TOKEN), "host": "0.0.0.0"},
        "auth_token_file=.*unencrypted on host=0.0.0.0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_read_is_refused_at_once(fault: str, tmp_path: Path, authority: Authority) -> None:
    make, message = FAULTS[fault]
    options = ServeOptions(**make(tmp_path, authority))
    with pytest.raises(UnsupportedOption, match=message) as caught:
        Transport.of(options)
    assert "secret" not in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tls_cert": Path("c")}, "tls_cert=c tls_key=None: each needs the other"),
        ({"tls_client_ca": Path("c")}, "tls_client_ca=c: needs tls_cert"),
        ({"max_message_mib": 0}, r"max_message_mib=0: must be in \[1, 1024\]"),
        ({"max_concurrent_streams": 0}, r"max_concurrent_streams=0: must be in \[1, "),
        ({"trace_sample_rate": 1.5, "otlp_endpoint": "http://x:1"}, r"trace_sample_rate=1.5: must be in \[0, 1\]"),
        ({"trace_sample_rate": 0.5}, "trace_sample_rate=0.5: needs otlp_endpoint"),
        ({"log_format": "xml"}, "log_format='xml': must be one of text, json"),
        ({"openai_port": 1, "auth_token_file": Path("t")}, "openai_port=1: cannot be combined with auth_token_file"),
        (
            {"openai_port": 1, "tls_cert": Path("c"), "tls_key": Path("k")},
            "openai_port=1: cannot be combined with tls_cert",
        ),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedOption, match=message):
        ServeOptions(**options)


def test_a_client_keeps_its_token_on_this_machine_without_tls() -> None:
    async def test() -> None:
        with pytest.raises(UnsupportedOption, match=r"token: would reach 192\.0\.2\.1:50051 unencrypted"):
            DcutClient("192.0.2.1:50051", token=TOKEN)

    run(test)
