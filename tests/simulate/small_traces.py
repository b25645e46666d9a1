"""Generated traces that are small, and a cost table for them."""

from __future__ import annotations

import numpy as np

from dcut_server.simulate.costs import Costs
from dcut_server.simulate.generator import Shape, generate
from dcut_server.simulate.traces import Trace
from dcut_trt.spec.cost_table import CostTable

SHAPE = Shape(level=1.5, decay=0.2, request_spread=0.5, block_spread=1.5, draft_spread=0.5, noise=0.5)
LENGTH = 7


def small_trace(seed: int = 0, requests: int = 40, positions: int = 50) -> Trace:
    return generate(SHAPE, draft_length=LENGTH, requests=requests, positions=positions, seed=seed, name="small")


def linear_costs(
    *, fixed_ms: float = 10.0, row_ms: float = 0.5, plain: bool = True, draft_depths: tuple[int, ...] = ()
) -> Costs:
    """A step costs fixed_ms + row_ms for each row; 5 + row_ms for each request when nobody drafts."""
    batches, ratios = (4, 8, 16), (0.25, 0.5, 0.75, 1.0)
    rows = np.array([[ratio * batch * (LENGTH + 1) for ratio in ratios] for batch in batches])
    table = CostTable(
        batches=batches,
        ratios=ratios,
        cost_ms=fixed_ms + row_ms * rows,
        plain_ms=5 + row_ms * np.array(batches, np.float64) if plain else None,
        fingerprint="linear",
        measured_at="",
        state="loaded",
        depths=draft_depths or None,
        draft_ms=np.outer(np.sqrt(batches), np.array(draft_depths) / 4) if draft_depths else None,
    )
    return Costs("linear", "made up", table)
