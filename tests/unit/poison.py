"""Garbage in every KV row that nobody may read any more."""

from __future__ import annotations

from dcut_trt.engine import Engine


def poison_unowned(engine: Engine) -> None:
    """Overwrite, in both caches of a scripted engine, the rows of blocks that are neither owned nor cached."""
    pool = engine.scheduler.pool
    unowned = [block for block in range(pool.num_blocks) if not pool.owners(block) and not pool.is_cached(block)]
    for network in (engine.target, engine.drafter):
        network._cache._cells[unowned] = -99  # type: ignore[union-attr]
