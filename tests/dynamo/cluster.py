"""A small cluster on loopback: Dynamo's frontend, and workers that each answer from a dcut-trt server of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import openai

from dcut_server.client import DcutClient

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".venv-dynamo" / "bin" / "python"
START_SECONDS = 90.0
LOOPBACK = "127.0.0.1"
MAX_BATCH, MAX_QUEUE = 8, 4


class Part:
    """One process of the cluster, ended by its own pid. log: where its output goes."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process, self.log = process, log

    @classmethod
    async def start(cls, log: Path, command: Sequence[str], environment: dict[str, str]) -> Part:
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, env=environment, stdin=asyncio.subprocess.DEVNULL
            )
        return cls(process, log)

    async def said(self, text: str) -> None:
        """Wait until its output holds `text`."""
        async with asyncio.timeout(START_SECONDS):
            while True:
                output = self.log.read_text(errors="replace")
                assert self.process.returncode is None, output[-2000:]
                if text in output:
                    return
                await asyncio.sleep(0.05)

    async def end(self, number: signal.Signals) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await self.process.wait()


@dataclass(slots=True)
class Cluster:
    """servers and workers: in pairs.  client: speaks to the frontend."""

    bundle: Path
    folder: Path
    ports: list[int]
    servers: list[Part] = field(default_factory=list)
    workers: list[Part] = field(default_factory=list)
    frontend: Part | None = None

    @property
    def addresses(self) -> list[str]:
        return [f"{LOOPBACK}:{port}" for port in self.ports[1:]]

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.ports[0]}"

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def parts(self) -> list[Part]:
        return [*self.servers, *self.workers, *([self.frontend] if self.frontend else [])]

    async def start_server(self, index: int) -> Part:
        command = (sys.executable, "-m", "dcut_server.cli", "serve", str(self.bundle))
        flags = ("--port", str(self.ports[1 + index]), "--threads", "1", "--max-queue", str(MAX_QUEUE))
        policy = ("--policy", "ratio:0.5", "--no-profile")  # it needs no cost table, which takes long to measure
        return await Part.start(self.folder / f"server{index}.log", (*command, *flags, *policy), dict(os.environ))

    async def start_worker(self, index: int) -> Part:
        command = (str(PEER), "-m", "dcut_server.dynamo", str(self.bundle), "--address", self.addresses[index])
        return await Part.start(self.folder / f"worker{index}.log", command, self.environment())

    async def start_frontend(self) -> Part:
        flags = ("--http-host", LOOPBACK, "--http-port", str(self.ports[0]), "--migration-limit", "3")
        command = (str(PEER), "-m", "dynamo.frontend", *flags)
        return await Part.start(self.folder / "frontend.log", command, self.environment())

    async def replace_worker(self, index: int) -> None:
        """Another worker for a server that has lost its own, once the frontend sends it requests."""
        self.workers[index] = await self.start_worker(index)
        await self.workers[index].said("Serving ")
        model = await model_listed(self)
        async with self.client() as client, DcutClient(self.addresses[index]) as direct, asyncio.timeout(START_SECONDS):
            before = (await direct.info()).totals.requests_finished
            while (await direct.info()).totals.requests_finished == before:
                await client.completions.create(model=model, prompt="Hi", max_tokens=1)

    def environment(self) -> dict[str, str]:
        ours = [str(ROOT), str(ROOT / "server"), str(ROOT / "engines")]
        return dict(os.environ) | {
            "PYTHONPATH": os.pathsep.join(ours),
            "DCUT_CACHE": str(self.folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": LOOPBACK,
            "DYN_TCP_RESPONSE_STREAM_HOST": LOOPBACK,
            "DYN_EVENT_PLANE_HOST": LOOPBACK,
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
            "DYN_SELF_HOST_METADATA": "0",
            "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        }


@contextlib.asynccontextmanager
async def cluster(bundle: Path, folder: Path, size: int = 2) -> AsyncIterator[Cluster]:
    """Everything is up inside the block and gone after it."""
    here = Cluster(bundle, folder, free_ports(1 + size))
    (folder / "discovery").mkdir()
    try:
        here.frontend = await here.start_frontend()
        for index in range(size):
            here.servers.append(await here.start_server(index))
            here.workers.append(await here.start_worker(index))
        for server, worker in zip(here.servers, here.workers, strict=True):
            await server.said("dcut-trt serving on")
            await worker.said("Serving ")
        await model_listed(here)
        yield here
    finally:
        for part in here.parts():
            await part.end(signal.SIGKILL)


async def model_listed(here: Cluster) -> str:
    """The name of the model, once the frontend has found it."""
    async with here.client() as client, asyncio.timeout(START_SECONDS):
        while True:
            assert here.frontend is not None
            await here.frontend.said("")  # it lives
            with contextlib.suppress(openai.APIConnectionError):
                models = await client.models.list()
                if models.data:
                    return models.data[0].id
            await asyncio.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind((LOOPBACK, 0))
        return [held.getsockname()[1] for held in sockets]
