"""The simulated world once more, one request at a time and without arrays."""

from __future__ import annotations

import math

import numpy as np

from dcut_server.simulate.traces import Trace
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.policy import Policy
from dcut_trt.stage_types import BatchView, Draft


def naive_cost(table: CostTable, batch: int, rows: int, block: int) -> float:
    """Straight lines between the captured budgets of a captured batch size, level below the first."""
    costs = table.cost_ms[table.batches.index(batch)].tolist()
    knots = [max(batch, math.ceil(ratio * batch * block - 1e-9)) for ratio in table.ratios]
    if rows <= knots[0]:
        return float(costs[0])
    for left, right, low, high in zip(knots, knots[1:], costs, costs[1:], strict=False):
        if rows <= right:
            return float(low + (high - low) * (rows - left) / (right - left))
    raise AssertionError("more rows than whole blocks have")


def naive_run(trace: Trace, table: CostTable, batch: int, policy: Policy, steps: int, starts: list[int]) -> dict:
    """starts: the position at which each of the first requests is. Whole blocks for all, any budget."""
    texts = [(int(a), int(b)) for a, b in zip(trace.starts, trace.starts[1:], strict=False)]
    live = [[number, place] for number, place in enumerate(starts)]
    coming = batch
    tokens = rows = 0
    ms = 0.0
    for _ in range(steps):
        contexts = [trace.prompt_lens[number] + place - texts[number][0] for number, place in live]
        view = BatchView(
            request_ids=tuple(str(number) for number, _ in live),
            context_lens=np.array(contexts, np.int32),
            pending_rows=np.zeros(batch, np.int32),
            temperatures=np.zeros(batch, np.float32),
        )
        confidence = np.array([trace.confidence[place] for _, place in live])
        selection = policy.select(Draft(np.zeros(confidence.shape, np.int32), confidence), view)
        size = batch
        for slot, (number, place) in enumerate(live):
            keep = int(selection.keep[slot])
            size += keep
            emitted = min(keep, int(trace.accepted[place])) + 1
            emitted = min(emitted, texts[number][1] - place)
            tokens += emitted
            live[slot][1] += emitted
        for slot, (number, place) in enumerate(live):
            if place == texts[number][1]:
                live[slot] = [coming % len(texts), texts[coming % len(texts)][0]]
                coming += 1
        rows += size
        ms += naive_cost(table, batch, size, trace.draft_length + 1)
    return {"tokens": tokens, "rows": rows, "ms": ms}
