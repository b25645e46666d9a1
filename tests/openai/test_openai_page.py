"""Every command of docs/openai.md runs as it stands, but for its ports and the bundle's place."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from http_server import MAX_BATCH, MODEL, prepared_table, until
from small_bundles import small_bundle

PAGE = Path(__file__).parents[2] / "docs" / "openai.md"
PORTS = ("50051", "50052", "8000", "8001", "29001")


def blocks() -> list[tuple[str, str]]:
    """Language and text of every code block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_every_command_on_the_page_runs(smollm2_bundle_bf16: Path, tmp_path: Path) -> None:
    with ExitStack() as sockets:
        taken = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in PORTS]
        ports = dict(zip(PORTS, (str(found.getsockname()[1]) for found in taken), strict=True))
    bundle, table = small_bundle(smollm2_bundle_bf16, tmp_path / "bundle", MAX_BATCH), prepared_table(tmp_path)
    output, ran = "", 0
    with ExitStack() as servers:
        for language, block in blocks():
            text = re.sub(r"\b(" + "|".join(PORTS) + r")\b", lambda found: ports[found[1]], block)
            text = text.replace("bundles/smollm2", f"{bundle} --cost-table {table}")
            if language == "text":
                assert text.strip() in output
            elif text.startswith(("dcut-trt serve", "HF_ENDPOINT")):
                servers.enter_context(_running(text, tmp_path / f"{ran}.log", _ready(text)))
            else:
                output = _run(language, text)
                _check(text, output)
            ran += language != "text"
    assert ran == len([language for language, _ in blocks() if language != "text"]) >= 9


def _run(language: str, text: str) -> str:
    command = [sys.executable, "-c", text] if language == "python" else ["bash", "-ec", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (text, done.stderr)
    return done.stdout


def _check(text: str, output: str) -> None:
    if '"stream": true' in text:
        events = [line.removeprefix("data: ") for line in output.splitlines() if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["usage"]["completion_tokens"] > 0
    elif "another-model" in text:
        assert "error" in json.loads(output)
    elif text.startswith("curl"):
        reply = json.loads(output)
        assert reply.get("choices") or reply["data"][0]["id"] == MODEL
    else:
        assert re.search(r"^\d+ tokens, \d+ drafted$", output, re.MULTILINE), output


def _ready(text: str) -> Callable[[str], bool]:
    """Whether a server that was started so serves, told by what it printed, or by its models."""
    if text.startswith("dcut-trt"):
        line = "OpenAI HTTP on" if "--openai-port" in text else "dcut-trt serving on"
        return lambda output: line in output
    port = re.search(r" --port (\d+)", text)
    assert port

    def serves(_output: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/v1/tokenizers", timeout=5) as reply:
                return bool(json.load(reply)["tokenizers"])
        except (OSError, KeyError):
            return False

    return serves


@contextmanager
def _running(text: str, log: Path, ready: Callable[[str], bool]) -> Iterator[None]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", "exec env " + text], stdout=output, stderr=output, env={**os.environ, "PATH": path}
        )
    try:
        until(lambda: process.poll() is not None or ready(log.read_text()), timeout_s=120)
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
