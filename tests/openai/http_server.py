"""`dcut-trt serve --openai-port 0` as a process, ended by its own pid, and the process of its gateway."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI

MODEL, SCRIPTED_MODEL = "smollm2-135m-instruct", "scripted target"
RATIOS = (0.25, 0.5, 0.75, 1.0)
MAX_BATCH = 4


@dataclass(frozen=True)
class Served:
    """address: of dcut.v1.  url: of OpenAI's API, ending in /v1."""

    process: subprocess.Popen[str]
    address: str
    url: str
    model: str
    log: Path

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=120)

    def gateway(self) -> int | None:
        """The pid of the gateway."""
        found = [pid for pid in children(self.process.pid) if b"smg" in command_line(pid)]
        assert len(found) <= 1, found
        return found[0] if found else None


@contextmanager
def served(bundle: Path, folder: Path, *arguments: str) -> Iterator[Served]:
    """`dcut-trt serve` of a bundle."""
    command = [sys.executable, "-m", "dcut_server.cli", "serve", str(bundle), "--port", "0", "--openai-port", "0"]
    with _served([*command, *arguments], folder, MODEL) as server:
        yield server


@contextmanager
def scripted(folder: Path, delay_s: float) -> Iterator[Served]:
    """A server over the scripted model, whose steps take delay_s."""
    script = Path(__file__).with_name("scripted_openai.py")
    with _served([sys.executable, str(script), str(delay_s)], folder, SCRIPTED_MODEL) as server:
        yield server


@contextmanager
def _served(command: list[str], folder: Path, model: str) -> Iterator[Served]:
    """Once it and its gateway serve; afterwards neither may be left."""
    log = folder / "serve.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    gateway = None
    try:
        address = _match(process, log, r"dcut-trt serving on (\S+)")
        url = _match(process, log, rf"OpenAI HTTP on (\S+) \(model {model}\)")
        found = Served(process, address, url, model, log)
        gateway = found.gateway()
        yield found
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()
        assert gateway is None or not alive(gateway), "the gateway outlived its server"


def prepared_table(folder: Path) -> Path:
    """A cost table whose choices need no measurement."""
    batches = [1, 2, 4]
    table = {
        "batches": batches,
        "ratios": list(RATIOS),
        "cost_ms": [[20.0 + 4.0 * batch * ratio for ratio in RATIOS] for batch in batches],
        "plain_ms": [20.0 + batch for batch in batches],
        "fingerprint": "prepared",
        "measured_at": "2026-01-01T00:00:00+00:00",
    }
    path = folder / "cost_table.json"
    path.write_text(json.dumps(table))
    return path


def children(pid: int) -> list[int]:
    """The living processes that pid started."""
    everyone = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [child for child in everyone if (fields := _stat(child)) and fields[1] == str(pid) and fields[0] not in "ZX"]


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    """A zombie that waits for its parent is not alive."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """State, parent and more; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def listening(pid: int) -> list[str]:
    """The IPv4 addresses that a process listens on; an IPv6 one is only named."""
    sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, port = (int(part, 16) for part in fields[1].split(":"))
                name = ".".join(str(byte) for byte in address.to_bytes(4, sys.byteorder)) if table == "tcp" else "IPv6"
                found.append(f"{name}:{port}")
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true in time"
        time.sleep(0.02)


def _match(process: subprocess.Popen[str], log: Path, pattern: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(pattern + "\n", line)
    assert found, f"{line!r}, {log.read_text()}"
    return found[1]
