"""The smg gateway as a child process: its command line, whether it is ready, its log, and its end."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import importlib.util
import json
import logging
import os
import secrets
import socket
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass

from dcut_trt.errors import DcutError, UnsupportedOption

START_TIMEOUT_S = 60.0
POLL_S = 0.05
ANSWER_TIMEOUT_S = 5.0
DRAIN_S = 5
"""How long the gateway may take to hand out replies that the engine has finished already."""

_log = logging.getLogger("dcut_server.gateway")
_LEVELS = {"ERROR": logging.WARNING}  # its warnings are about features that are off here, or callers' mistakes

# Runs smg so that the kernel ends it with us, however we end; nothing of us is imported there.
_CHILD = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the server has ended")
from smg.cli import main
main(sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """Where the gateway listens, the server that it calls, the model's name, and the key to its control plane."""

    host: str
    port: int
    worker: str
    model: str
    control_key: str

    @classmethod
    def of(cls, host: str, port: int, worker: str, model: str) -> GatewayPlan:
        """port 0 takes a free one. Raises DcutError when nobody can listen there."""
        return cls(host, free_port(host, port), worker, model, secrets.token_hex(16))

    @property
    def url(self) -> str:
        """The base URL for a client on this machine."""
        return f"http://{authority(reachable(self.host), self.port)}"

    def arguments(self) -> list[str]:
        """The arguments of smg. Failed calls are told at once: with one worker a retry only hides its answer."""
        return [
            *launch_arguments(self.host, self.port, self.worker, self.model),
            *("--prometheus-port", str(free_port("127.0.0.1", 0))),
            *("--control-plane-api-keys", f"dcut:dcut-trt:admin:{self.control_key}"),
            *("--log-level", "warn", "--log-json"),
        ]


def launch_arguments(host: str, port: int, worker: str, model: str) -> list[str]:
    """What to tell smg to put it in front of a server, by us or by hand.

    Without a --model-path it would load no tokenizer; one that names no directory makes it ask the server for its own.
    """
    return [
        *("launch", "--host", host, "--port", str(port), "--worker-urls", f"grpc://{worker}"),
        *("--model-path", model),
        *("--policy", "round_robin", "--prometheus-host", "127.0.0.1", "--history-backend", "none"),
        *("--shutdown-grace-period-secs", str(DRAIN_S)),
        *("--disable-retries", "--disable-circuit-breaker", "--disable-worker-overload-protection"),
        "--disable-load-monitoring",
    ]


def require_smg(port: int, worker: str) -> None:
    """Raises UnsupportedOption where smg is not installed."""
    if importlib.util.find_spec("smg") is None:
        raise UnsupportedOption(
            f"openai_port={port}: needs smg. Install: pip install 'dcut-trt[openai]', or run it elsewhere: "
            + " ".join(["smg", *launch_arguments("127.0.0.1", port or 8000, worker, "MODEL")])
        )


def reachable(host: str) -> str:
    """An address of this machine to call a server that listens on host."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "[::1]"}.get(host, host)


def authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port(host: str, port: int) -> int:
    """The port itself, or a free one for 0. Raises DcutError when nobody can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as found:
            return int(found.getsockname()[1])
    except OSError as error:
        raise DcutError(f"openai_port={port}: cannot listen on {authority(host, port)}: {error.strerror}") from error


class GatewayProcess:
    """One run of smg: start(), then wait() or end()."""

    def __init__(self, plan: GatewayPlan, process: asyncio.subprocess.Process) -> None:
        self.plan = plan
        self.process = process
        self._ready = False
        self._last_lines: collections.deque[str] = collections.deque(maxlen=3)
        self._reading = asyncio.create_task(self._read_log())

    @classmethod
    async def start(cls, plan: GatewayPlan) -> GatewayProcess:
        """Start it and wait until it serves the model. Raises DcutError when it ends or stays silent instead."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _CHILD, str(os.getpid()), *plan.arguments()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C must not end it before the streams have ended
            # It asks a model hub for the tokenizer before it asks us: no call leaves this machine.
            env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
        )
        gateway = cls(plan, process)
        try:
            await gateway._wait_ready()
        except BaseException:
            await gateway.end(0.0)
            raise
        gateway._ready = True
        return gateway

    async def wait(self) -> str:
        """Wait for its end; why, in words."""
        code = await self.process.wait()
        await self._reading
        return f"smg ended with code {code}" + "".join(f"\n  {line}" for line in self._last_lines)

    async def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL when it is not gone after grace_s."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), grace_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        await self._reading

    async def _wait_ready(self) -> None:
        limit = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while not await asyncio.to_thread(_serves, self.plan):
            if self.process.returncode is not None:
                raise DcutError(f"openai_port={self.plan.port}: {await self.wait()}")
            if asyncio.get_running_loop().time() > limit:
                raise DcutError(f"openai_port={self.plan.port}: smg was not ready in {START_TIMEOUT_S:.0f} seconds")
            await asyncio.sleep(POLL_S)

    async def _read_log(self) -> None:
        assert self.process.stdout is not None
        while line := await _read_line(self.process.stdout):
            level, text = _parse_log(line)
            if text:
                self._last_lines.append(text)
                # While it starts it reports every attempt; what matters then is whether it gets ready.
                _log.log(level if self._ready else logging.DEBUG, "smg: %s", text)


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """The next line; of one that is too long for the reader, its last part."""
    while True:
        try:
            return await stream.readline()
        except ValueError:
            continue


def _parse_log(line: bytes) -> tuple[int, str]:
    """Level and text of one line of smg's; what is no JSON is its banner or a stack trace."""
    text = line.decode(errors="replace").strip()
    try:
        entry = json.loads(text)
        fields = entry.get("fields", entry)
        return _LEVELS.get(entry.get("level"), logging.DEBUG), str(fields.get("message", text))
    except (ValueError, AttributeError):
        return logging.DEBUG, "" if any("\u2800" <= sign <= "\u28ff" for sign in text) else text


def _serves(plan: GatewayPlan) -> bool:
    """Whether the gateway knows the model and its tokenizer."""
    models = _get(f"{plan.url}/v1/models", plan.control_key).get("data", [])
    tokenizers = _get(f"{plan.url}/v1/tokenizers", plan.control_key).get("tokenizers", [])
    return bool(tokenizers) and any(model.get("id") == plan.model for model in models)


def _get(url: str, key: str) -> dict[str, list[dict[str, str]]]:
    """A JSON object, empty when there is no answer yet."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_TIMEOUT_S) as reply:
            answer = json.load(reply)
            return answer if isinstance(answer, dict) else {}
    except (OSError, ValueError):
        return {}
