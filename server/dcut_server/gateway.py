"""OpenAI's HTTP API beside our server: an smg gateway in a process of its own, which calls our TrtllmService."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from dcut_server.gateway_process import DRAIN_S, GatewayPlan, GatewayProcess, authority, reachable, require_smg
from dcut_server.lifecycle import DcutServer
from dcut_server.serve_options import ServeOptions
from dcut_trt.errors import DcutError

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0
"""A gateway that lived this long had started well: the next pause is short again."""

_log = logging.getLogger(__name__)


def openai_gateway(options: ServeOptions) -> Callable[[DcutServer], AbstractAsyncContextManager[str]]:
    """The sidecar that serves OpenAI's API on options.openai_port. Raises UnsupportedOption where smg is missing."""
    port = options.openai_port or 0
    require_smg(port, authority(reachable(options.host), options.port))

    @asynccontextmanager
    async def sidecar(server: DcutServer) -> AsyncIterator[str]:
        host, _, worker_port = server.address.rpartition(":")
        plan = GatewayPlan.of(options.host, port, f"{reachable(host)}:{worker_port}", server.host.identity.target)
        keeper = _Keeper(plan, await GatewayProcess.start(plan))
        keeping = asyncio.create_task(keeper.keep())
        try:
            yield f"OpenAI HTTP on {plan.url}/v1 (model {plan.model})"
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
            await keeper.gateway.end(DRAIN_S + 1.0)

    return sidecar


class _Keeper:
    """Starts the gateway again whenever it ends by itself."""

    def __init__(self, plan: GatewayPlan, gateway: GatewayProcess) -> None:
        self._plan = plan
        self.gateway = gateway

    async def keep(self) -> None:
        """Runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while True:
            started = loop.time()
            reason = await self.gateway.wait()
            if loop.time() - started > STEADY_S:
                pause_s = FIRST_PAUSE_S
            pause_s = await self._start_again(reason, pause_s)

    async def _start_again(self, reason: str, pause_s: float) -> float:
        """Try until it serves; the pause to make after its next end."""
        while True:
            _log.error("%s; starting it again in %.2f seconds", reason, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                self.gateway = await GatewayProcess.start(self._plan)
            except DcutError as error:
                reason = str(error)
            else:
                _log.warning("OpenAI HTTP on %s/v1 serves again", self._plan.url)
                return pause_s
