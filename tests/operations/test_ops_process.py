"""The real command line as a process: logs, scrapes, drain, TLS from openssl's own files, and refusals."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from live_server import run
from operated import get, read_lines, samples_of, served, value

from dcut_server.client import CallFailed, Chunk, DcutClient
from dcut_trt.types import FinishReason

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
SERVING = "dcut-trt serving on "


def started(lines: list[str]) -> tuple[str, str]:
    """Address of the server, base URL of its metrics port."""
    url = next((line.removeprefix("metrics at ").removesuffix("/metrics") for line in lines if "metrics" in line), "")
    return lines[-1].removeprefix(SERVING), url


def test_json_logs_tell_every_request_and_never_its_text() -> None:
    with served("--log-format", "json", "--metrics-port", "0") as process:
        address, _ = started(read_lines(process, lambda line: line.startswith(SERVING)))

        async def test() -> None:
            async with DcutClient(address) as client:
                answer = await client.complete("Hush-hush", request_id="one", max_tokens=12, ignore_eos=True)
                assert answer.usage.output_tokens == 12
                async for _ in client.generate("Hush-hush", request_id="two", max_tokens=4000, ignore_eos=True):
                    break
                with pytest.raises(CallFailed):
                    await client.complete("Hush-hush", request_id="three", max_tokens=0)

        run(test)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=20)
        assert process.returncode == 0, errors
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    assert len(lines) == len([line for line in errors.splitlines() if not line.startswith("running ")])
    finished = {line["request_id"]: line for line in lines if line["message"] == "request finished"}
    assert set(finished) == {"one", "two"}
    one = finished["one"]
    assert (one["finish"], one["prompt_tokens"], one["output_tokens"], one["error"]) == ("length", 9, 12, None)
    assert one["accepted"] <= one["verified"] <= one["drafted"]
    assert 0 <= one["queue_ms"] <= one["ttft_ms"] <= one["total_ms"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", one["time"])
    assert finished["two"]["finish"] == "aborted"
    assert "ush-hush" not in errors + output


def test_text_logs_have_one_line_per_request() -> None:
    with served() as process:
        address, _ = started(read_lines(process, lambda line: line.startswith(SERVING)))

        async def test() -> None:
            async with DcutClient(address) as client:
                await client.complete("a", request_id="one", max_tokens=3, ignore_eos=True)

        run(test)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    (line,) = [line for line in errors.splitlines() if "request finished" in line]
    assert "INFO dcut_server.requests: request finished request_id=one finish=length prompt_tokens=1" in line


def test_metrics_show_a_drain_until_the_last_stream_ends() -> None:
    with served("--metrics-port", "0", delay_s=0.01) as process:
        address, base = started(read_lines(process, lambda line: line.startswith(SERVING)))

        async def scraped() -> dict[Any, float]:
            return samples_of((await asyncio.to_thread(get, f"{base}/metrics"))[1])

        async def read(client: DcutClient, chunks: list[Chunk]) -> None:
            async for chunk in client.generate("a", max_tokens=300, ignore_eos=True):
                chunks.append(chunk)

        async def test() -> None:
            async with DcutClient(address) as client:
                assert value(await scraped(), "server_state", state="serving") == 1
                chunks: list[Chunk] = []
                stream = asyncio.create_task(read(client, chunks))
                while not chunks:
                    await asyncio.sleep(0.01)
                process.send_signal(signal.SIGTERM)
                while value(await scraped(), "server_state", state="draining") != 1:
                    await asyncio.sleep(0.01)
                assert value(await scraped(), "num_requests_running") == 1
                assert (await asyncio.to_thread(get, f"{base}/readyz"))[0] == 503
                assert (await asyncio.to_thread(get, f"{base}/healthz"))[0] == 200
                with pytest.raises(CallFailed):
                    await client.complete("too late")
                await stream
                assert chunks[-1].finish is FinishReason.LENGTH

        run(test)
        process.communicate(timeout=20)
        assert process.returncode == 0


def test_the_documented_openssl_commands_make_files_that_serve_mutual_tls(tmp_path: Path) -> None:
    block = re.search(r"```\n(openssl .*?)```", DOCS.read_text(), re.DOTALL)
    assert block is not None
    subprocess.run(["bash", "-euc", block[1]], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "tokens").write_text("a-token-long-enough\n")
    files = {name: str(tmp_path / name) for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")}
    tls = ["--tls-cert", files["server.pem"], "--tls-key", files["server.key"], "--tls-client-ca", files["ca.pem"]]
    with served(*tls, "--auth-token-file", str(tmp_path / "tokens")) as process:
        address, _ = started(read_lines(process, lambda line: line.startswith(SERVING)))
        asked = [sys.executable, "-m", "dcut_server.cli", "client", "--address", address, "--raw", "--max-tokens", "5"]
        ours = ["--tls-ca", files["ca.pem"], "--tls-cert", files["client.pem"], "--tls-key", files["client.key"]]
        good = subprocess.run(
            [*asked, *ours, "--token", "a-token-long-enough", "hi"], check=False, capture_output=True, text=True
        )
        assert good.returncode == 0, good.stderr
        assert "5 tokens" in good.stderr
        bad = subprocess.run([*asked, *ours, "hi"], check=False, capture_output=True, text=True)
        assert (bad.returncode, bad.stdout) == (2, "")
        assert bad.stderr.startswith("dcut-trt: UNAUTHENTICATED: authorization metadata is missing")


def test_refusals_are_one_line_and_exit_2(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    one, two = authority.issue("one"), authority.issue("two")
    for flags, start in (
        (["--tls-cert", str(one.cert), "--tls-key", str(two.key)], f"tls_cert={one.cert} tls_key={two.key}: the key"),
        (["--auth-token-file", str(tmp_path / "none")], f"auth_token_file={tmp_path / 'none'}: No such file"),
        (["--otlp-endpoint", "collector"], "otlp_endpoint='collector': must be http://"),
    ):
        with served(*flags) as process:
            output, errors = process.communicate(timeout=20)
        assert (process.returncode, output) == (2, "")
        assert errors.startswith(f"dcut-trt: {start}")
        assert errors.count("\n") == 1


def test_a_taken_metrics_port_ends_the_process() -> None:
    with served("--metrics-port", "0") as first:
        _, base = started(read_lines(first, lambda line: line.startswith(SERVING)))
        port = base.rpartition(":")[2]
        with served("--metrics-port", port) as second:
            _, errors = second.communicate(timeout=20)
    assert second.returncode == 2
    assert errors.startswith(f"dcut-trt: metrics_port={port}: cannot listen on 127.0.0.1:{port}")
