"""A `dcut-trt serve` of our own, as a child process that never outlives us."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dcut_trt.errors import EngineUnavailable

START_TIMEOUT_S = 300.0  # a first start profiles the machine
STOP_TIMEOUT_S = 30.0
_READY = re.compile(r"dcut-trt serving on (\S+)")
_STAGE = re.compile(r"\b(check|load|profile) (\d+)/(\d+)")

StageProgress = Callable[[str, int, int], None]


class ServeProcess:
    """One server process. address: where it listens."""

    def __init__(self, process: asyncio.subprocess.Process, progress: StageProgress) -> None:
        self.address = ""
        self._process = process
        self._progress = progress
        self._log: deque[str] = deque(maxlen=12)
        self._reading = asyncio.create_task(self._read_log())

    async def wait_ready(self) -> None:
        """Read its output until it serves. Raises EngineUnavailable when it ends or takes too long."""
        assert self._process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                while line := await self._process.stdout.readline():
                    if ready := _READY.search(line.decode()):
                        self.address = ready[1]
                        return
                await self._reading
        raise EngineUnavailable(f"the server did not start:\n{self.log_tail}")

    async def stop(self) -> int:
        """SIGTERM, then wait; the exit code. Raises EngineUnavailable when it had to be killed."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                await self.kill()
                raise EngineUnavailable(
                    f"the server did not stop within {STOP_TIMEOUT_S:.0f} s of SIGTERM:\n{self.log_tail}"
                ) from None
        await self._reading
        return await self._process.wait()

    async def kill(self) -> None:
        """End it at once, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log_tail(self) -> str:
        return "\n".join(self._log)

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            self._log.append(text)
            if stage := _STAGE.search(text):
                self._progress(stage[1], int(stage[2]), int(stage[3]))


@asynccontextmanager
async def serve_process(bundle: Path, flags: Sequence[str], progress: StageProgress) -> AsyncIterator[ServeProcess]:
    """Start a server of this bundle on a free loopback port; it is ready inside the block and gone after it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dcut_server.cli", "--log-level", "info", "serve", str(bundle), "--port", "0", *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches us alone; we pass it on as SIGTERM and wait
    )
    server = ServeProcess(process, progress)
    try:
        await server.wait_ready()
        yield server
    finally:
        if process.returncode is None:
            await server.kill()
