"""A real tritonserver as a process of its own, a dcut-trt server for it to relay to, and how a test asks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import np_to_triton_dtype

ROOT = Path(__file__).resolve().parents[2]
PEER = ROOT / ".venv-triton" / "bin" / "python"
DTYPES = {"temperature": np.float32, "top_p": np.float32, "seed": np.uint64, "ignore_eos": np.bool_, "stop": np.object_}
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Triton:
    """A running tritonserver. log: everything that it wrote."""

    http: str
    grpc: str
    metrics: str
    log: Path

    def client(self) -> InferenceServerClient:
        return InferenceServerClient(self.grpc)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """HTTP status and body of one call of the generate extension."""
        call = urllib.request.Request(f"http://{self.http}/v2/models/dcut/{path}", json.dumps(body).encode())
        try:
            with NO_PROXY.open(call, timeout=30) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def counters(self) -> dict[str, float]:
        """Our samples of the metrics page; requests by their outcome."""
        with NO_PROXY.open(f"http://{self.metrics}/metrics", timeout=30) as reply:
            families = text_string_to_metric_families(reply.read().decode())
            return {
                sample.labels.get("outcome", sample.name): sample.value
                for family in families
                for sample in family.samples
                if sample.name.startswith("dcut_")
            }


@contextlib.contextmanager
def triton(address: str, folder: Path) -> Iterator[Triton]:
    """Relays to `address`. Ends by SIGTERM with code 0, and then no request may be waiting for its final response."""
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    log = folder / "tritonserver.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [PEER, ROOT / "server/triton/run_triton.py", "--address", address, "--cache-dir", folder, *ports],
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        try:
            # tritonserver itself writes to the same stream.
            line = next((line for line in process.stdout if line.startswith(b"tritonserver ready")), b"")
            found = re.findall(r"(\w+)=(127\.0\.0\.1:\d+)", line.decode())
            assert found, log.read_text()
            yield Triton(**dict(found), log=log)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
            assert "Found 0 model versions that have in-flight inferences" in log.read_text()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=20)
            process.stdout.close()


@contextlib.contextmanager
def serving_bundle(bundle: Path) -> Iterator[str]:
    """`dcut-trt serve` for a real model; its address."""
    command = [sys.executable, "-m", "dcut_server.cli", "serve", bundle, "--port", "0"]
    flags = ["--policy", "dflash", "--no-profile", "--grace-seconds", "1"]
    server = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = next((line for line in server.stdout if line.startswith("dcut-trt serving on ")), "")
        assert line, "the server ended instead of serving"
        yield line.split()[-1]
    finally:
        server.terminate()
        server.wait(timeout=30)
        server.stdout.close()


@dataclass
class Answer:
    """What came back on one stream. finals: responses that said they are the last.  error: Triton's message."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    finals: int = 0
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, result: Any, error: Any) -> None:
        assert self.finals == 0, "a response after the final one"
        if error is not None:
            self.error, self.finals = str(error), 1
            return
        self.finals += result.get_response().parameters["triton_final_response"].bool_param
        self.texts.append(result.as_numpy("text_output")[0].decode())
        self.token_ids += result.as_numpy("output_ids").tolist()
        for name in ("finish_reason", "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"):
            values = result.as_numpy(name)
            if values is not None:
                self.last[name] = values[0]


def tensors(prompt: str | bytes, *, streaming: bool = True, **options: Any) -> list[InferInput]:
    """Inputs of one request; options are named as dcut.v1's, without the prefix."""
    text = prompt.encode() if isinstance(prompt, str) else prompt
    values = {"text_input": np.array([text], np.object_), "streaming": np.array([streaming])}
    for name, value in options.items():
        listed = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        values[f"sampling_param_{name}"] = np.array(listed, DTYPES.get(name, np.int32))
    return [_tensor(name, value) for name, value in values.items()]


def _tensor(name: str, values: Any) -> InferInput:
    tensor = InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    tensor.set_data_from_numpy(values)
    return tensor


def stream(client: InferenceServerClient, *requests: list[InferInput], headers: dict[str, str] | None = None) -> Any:
    """The responses of requests sent on one gRPC stream: pairs of result and error."""

    async def inputs() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield {"model_name": "dcut", "inputs": request}

    return client.stream_infer(inputs(), headers=headers)


async def ask(client: InferenceServerClient, prompt: str | bytes, **options: Any) -> Answer:
    answer = Answer()
    async for result, error in stream(client, tensors(prompt, **options)):
        answer.add(result, error)
    assert answer.finals == 1
    return answer


async def code_of(running: Triton, prompt: str, **options: Any) -> grpc.StatusCode:
    """The status that a refused request ends with, for a client that asks for one instead of a message."""
    async with running.client() as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream(client, tensors(prompt, **options), headers={"triton_grpc_error": "true"}):
                pass
    return caught.value.code()


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Wait until an async condition holds; fails when it does not come."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.01)
