"""From the engine's steps to the frames that viewers get."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from importlib.metadata import version
from typing import Any

from dcut_server.convert import cost_table_to_proto
from dcut_server.dashboard.strips import Strips
from dcut_server.dashboard.window import Window
from dcut_server.host import EngineHost
from dcut_trt.errors import EngineUnavailable
from dcut_trt.metrics import StepRecord, StepTrace
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.types import Commit

FRAME_S = 0.25
LINGER_S = 60.0
"""How long the feed goes on after the last viewer left, so that a page that is loaded again keeps its curves."""

MAX_VIEWERS = 32
STEPS_BETWEEN_FRAMES = 4096


class Feed:
    """Listens to the engine while somebody watches, and makes one frame for all viewers every FRAME_S.

    A frame is the whole picture, so a slow viewer misses some and loses nothing; no viewer has a queue.
    Belongs to the event loop's thread, except for hear().
    """

    def __init__(self, host: EngineHost, address: str) -> None:
        """address: where the gRPC server of this host answers."""
        self._host, self._address = host, address
        self._started = time.monotonic()
        self._heard: deque[tuple[StepRecord, Sequence[Commit]]] = deque(maxlen=STEPS_BETWEEN_FRAMES)
        self._trace: StepTrace | None = None  # where we listen
        self._strips, self._window = Strips(), Window()
        self._table: CostTable | None = None
        self._table_version = 0
        self._viewers = 0
        self._running: asyncio.Task[None] | None = None
        self._news = asyncio.Condition()
        self._frame, self._frame_number = b"", 0
        self._closed = False

    def hear(self, record: StepRecord, commits: Sequence[Commit]) -> None:
        """Called by the engine's thread after every step."""
        self._heard.append((record, commits))

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The newest frame, and again whenever there is a newer one; ends when the feed closes.

        Raises EngineUnavailable when MAX_VIEWERS watch already.
        """
        if self._viewers >= MAX_VIEWERS:
            raise EngineUnavailable(f"{self._viewers} viewers watch already; must be at most {MAX_VIEWERS}")
        self._viewers += 1
        try:
            if self._running is None and not self._closed:
                self._running = asyncio.create_task(self._run())
            seen = 0
            while not self._closed:
                async with self._news:
                    while self._frame_number == seen and not self._closed:
                        await self._news.wait()
                seen = self._frame_number
                yield self._frame
        finally:
            self._viewers -= 1

    async def close(self) -> None:
        self._closed = True
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
        async with self._news:
            self._news.notify_all()

    def snapshot(self) -> dict[str, Any]:
        """All a page shows but the cost table's numbers. What derives from steps is empty while nobody watches."""
        now, host, engine = time.monotonic(), self._host, self._host.engine
        identity = host.identity
        self._follow_table()
        return {
            "server": {
                "version": version("dcut-trt"),
                "address": self._address,
                "state": host.state.value,
                "uptime_s": round(now - self._started, 1),
                "target": identity.target,
                "drafter": identity.drafter,
                "backend": identity.backend,
                "precision": identity.precision,
                "policy": engine.policy.name if engine else identity.policy,
                "draft_length": identity.draft_length,
                "ratios": identity.ratios,
                "max_batch": identity.max_batch,
            },
            "gauges": {
                "running": engine.running if engine else 0,
                "waiting": engine.waiting if engine else 0,
                "free_kv_blocks": engine.free_blocks if engine else 0,
            },
            "totals": dataclasses.asdict(engine.trace.totals) if engine else None,
            "window": self._window.to_json(),
            "history": self._window.history(now),
            "requests": self._strips.to_json(),
            "cost_table": {"version": self._table_version, "used": self._used_cell()},
        }

    def cost_table(self) -> dict[str, Any]:
        """What GetCostTable says, as JSON."""
        self._follow_table()
        message = cost_table_to_proto(self._table)
        return {
            "version": self._table_version,
            "state": message.state,
            "fingerprint": message.fingerprint,
            "measured_at": message.measured_at,
            "ratios": list(message.ratios),
            "rows": [
                {"batch": row.batch, "cost_ms": list(row.cost_ms), "plain_ms": row.plain_ms or None}
                for row in message.rows
            ],
        }

    async def _run(self) -> None:
        """Until nobody has watched for LINGER_S."""
        last_watched = time.monotonic()
        with self._listening():
            while self._viewers or time.monotonic() - last_watched <= LINGER_S:
                if self._viewers:
                    last_watched = time.monotonic()
                self._listen()
                self._digest()
                async with self._news:
                    self._frame = json.dumps(self.snapshot(), separators=(",", ":")).encode()
                    self._frame_number += 1
                    self._news.notify_all()
                await asyncio.sleep(FRAME_S)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._trace is not None:
                # A new list: the engine's thread may be walking over this one.
                self._trace.listeners = [listener for listener in self._trace.listeners if listener != self.hear]
            self._trace = self._running = None
            self._frame_number = 0  # the next viewer waits for a fresh frame
            self._strips, self._window = Strips(), Window()

    def _listen(self) -> None:
        """As soon as there is an engine."""
        if self._trace is None and self._host.engine is not None:
            self._trace = self._host.engine.trace
            self._trace.listeners = [*self._trace.listeners, self.hear]

    def _digest(self) -> None:
        """Count what was heard since the last frame."""
        now, records = time.monotonic(), []
        for _ in range(len(self._heard)):
            record, commits = self._heard.popleft()
            records.append(record)
            for commit in commits:
                self._strips.add(commit, now, first=record.kind == "prefill")
        engine = self._host.engine
        self._window.add(now, records, busy=engine is not None and engine.running > 0)
        if engine is not None:
            self._strips.settle(set(engine.scheduler.live_ids()), now)

    def _follow_table(self) -> None:
        """Give every table that is put in place a number, by which a page sees that it must read it again."""
        table = self._host.engine.cost_table if self._host.engine else None
        if table is not self._table:
            self._table, self._table_version = table, self._table_version + 1

    def _used_cell(self) -> dict[str, Any] | None:
        """The row and column of the table nearest to the last decode step; ratio None is a step without drafts."""
        table, last = self._table, self._window.last_decode
        if table is None or last is None or not self._host.engine or not self._host.engine.running:
            return None
        share = last.verified_share
        return {
            "batch": table.batches[table.nearest(last.batch)],
            "ratio": None if share is None else min(table.ratios, key=lambda ratio: abs(ratio - share)),
        }
