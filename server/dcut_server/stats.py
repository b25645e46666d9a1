"""One line a second about what the engine does, for a person who watches the server."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable

from dcut_trt.engine import Engine
from dcut_trt.metrics import StepRecord, Totals

PERIOD_S = 1.0


async def print_stats(engine: Engine, write: Callable[[str], object]) -> None:
    """Write a line every second in which something ran; runs until cancelled."""
    before, then = copy.copy(engine.trace.totals), time.monotonic()
    while True:
        await asyncio.sleep(PERIOD_S)
        totals, now = copy.copy(engine.trace.totals), time.monotonic()
        steps = totals.steps - before.steps
        if steps or engine.waiting:
            recent = list(engine.trace.records)[-steps:] if steps else []
            write(stats_line(engine.running, engine.waiting, before, totals, recent, now - then))
        before, then = totals, now


def stats_line(
    running: int, waiting: int, before: Totals, after: Totals, recent: list[StepRecord], seconds: float
) -> str:
    """What happened between two readings of the totals. recent: the records of the steps between them."""
    ratios = sorted({record.ratio for record in recent if record.ratio is not None})
    drafted, kept = after.drafted - before.drafted, after.verified - before.verified
    accepted, tokens = after.accepted - before.accepted, after.output_tokens - before.output_tokens
    chosen = "/".join(f"{ratio:g}" for ratio in ratios) or "-"
    return (
        f"running {running} waiting {waiting} | {tokens / seconds:.1f} tokens/s | ratio {chosen} | "
        f"kept {kept} of {drafted} drafts | accepted {accepted}"
    )
