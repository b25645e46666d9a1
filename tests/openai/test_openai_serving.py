"""The gateway under load and in trouble: many streams, callers who leave, its own end, and the server's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from http_server import MODEL, Served, alive, children, kill, listening, scripted, until

from dcut_server import gateway_process
from dcut_server.client import DcutClient, complete
from dcut_server.gateway import openai_gateway
from dcut_server.gateway_process import GatewayPlan, GatewayProcess
from dcut_server.serve_options import ServeOptions
from dcut_trt.errors import DcutError, UnsupportedOption


def gauges(server: Served) -> Any:
    async def ask() -> Any:
        async with DcutClient(server.address) as client:
            return (await client.info()).gauges

    return asyncio.run(ask())


def nothing_runs(server: Served) -> bool:
    found = gauges(server)
    return bool(found.running == found.waiting == 0)


def long_stream(server: Served, tokens: int = 900) -> Any:
    return server.client.completions.create(
        model=server.model, prompt="Once upon a time", max_tokens=tokens, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


def test_64_streams_at_once_all_give_their_solo_text(openai_server: Served) -> None:
    prompts = [f"{number} plus {number} is" for number in range(8)]
    solo = {prompt: complete(openai_server.address, prompt, max_tokens=4).text for prompt in prompts}
    client = openai_server.client

    def stream(number: int) -> bool:
        prompt = prompts[number % 8]
        events = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0, stream=True)
        return "".join(event.choices[0].text for event in events) == solo[prompt]

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        assert all(pool.map(stream, range(64)))
    until(lambda: nothing_runs(openai_server))


def test_a_caller_who_leaves_in_mid_stream_frees_the_slot(scripted_server: Served) -> None:
    stream = long_stream(scripted_server, tokens=1900)
    next(iter(stream))
    assert gauges(scripted_server).running == 1
    stream.close()
    until(lambda: nothing_runs(scripted_server), timeout_s=5.0)  # all 1900 tokens would take far longer


def test_a_killed_gateway_is_started_again_on_its_port(scripted_server: Served) -> None:
    before = scripted_server.gateway()
    assert before is not None
    kill(before)
    until(lambda: not alive(before))

    def answers() -> bool:
        try:
            return bool(
                scripted_server.client.completions.create(
                    model=scripted_server.model, prompt="Hi", max_tokens=1
                ).choices
            )
        except openai.APIError:
            return False

    until(answers)
    assert scripted_server.gateway() != before
    assert "smg ended with code -9" in scripted_server.log.read_text()


def test_only_the_asked_port_and_a_loopback_one_are_open(scripted_server: Served) -> None:
    until(lambda: scripted_server.gateway() is not None)
    gateway = scripted_server.gateway()
    assert gateway is not None
    addresses = listening(gateway)
    assert len(addresses) == 2
    assert scripted_server.url.removeprefix("http://").removesuffix("/v1") in addresses
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_sigterm_lets_http_streams_finish_and_leaves_no_process(tmp_path: Path) -> None:
    with scripted(tmp_path, delay_s=0.01) as server:
        gateway = server.gateway()
        events = iter(long_stream(server, tokens=300))
        texts = [next(events).choices[0].text]
        server.process.send_signal(signal.SIGTERM)
        finish = None
        for event in events:
            texts.append(event.choices[0].text)
            finish = event.choices[0].finish_reason or finish
        assert finish == "length"
        assert len(texts) > 1
        assert server.process.wait(timeout=60) == 0
        assert gateway is not None
        assert not alive(gateway)


def test_a_killed_server_takes_its_gateway_along(tmp_path: Path) -> None:
    with scripted(tmp_path, delay_s=0.01) as server:
        gateway = server.gateway()
        assert gateway is not None
        assert children(server.process.pid) == [gateway]
        kill(server.process.pid)
        until(lambda: not alive(gateway))


def test_without_smg_the_option_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedOption, match=r"pip install 'dcut-trt\[openai\]'") as caught:
        openai_gateway(ServeOptions(openai_port=8000, port=50051))
    assert "smg launch --host 127.0.0.1 --port 8000 --worker-urls grpc://127.0.0.1:50051" in str(caught.value)


def test_a_taken_port_is_one_clear_error() -> None:
    with gateway_process.socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DcutError, match=f"openai_port={port}: cannot listen on 127.0.0.1:{port}"):
            GatewayPlan.of("127.0.0.1", port, "127.0.0.1:1", MODEL)


def test_a_gateway_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatewayPlan, "arguments", lambda _plan: ["launch", "--no-such-option"])
    plan = GatewayPlan.of("127.0.0.1", 0, "127.0.0.1:1", MODEL)
    with pytest.raises(DcutError, match=r"smg ended with code 2(.|\n)*--no-such-option"):
        asyncio.run(GatewayProcess.start(plan))


def test_starts_after_failures_wait_longer_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def fail(_plan: GatewayPlan) -> Any:
        if len(pauses) == 12:
            raise asyncio.CancelledError
        raise DcutError("cannot start")

    async def note(pause_s: float) -> None:
        pauses.append(pause_s)

    async def ended() -> str:
        return "smg ended with code 1"

    from dcut_server import gateway  # noqa: PLC0415

    monkeypatch.setattr(GatewayProcess, "start", fail)
    monkeypatch.setattr(gateway.asyncio, "sleep", note)
    keeper = gateway._Keeper(SimpleNamespace(url=""), SimpleNamespace(wait=ended))  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(keeper.keep())
    assert pauses[:3] == [0.25, 0.5, 1.0]
    assert max(pauses) == pauses[-1] == gateway.LONGEST_PAUSE_S


def test_ctrl_c_of_a_terminal_does_not_reach_the_gateway(scripted_server: Served) -> None:
    until(lambda: scripted_server.gateway() is not None)
    gateway = scripted_server.gateway()
    assert gateway is not None
    assert os.getpgid(gateway) != os.getpgid(scripted_server.process.pid)
