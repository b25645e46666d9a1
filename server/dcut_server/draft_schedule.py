"""Our cost table as TensorRT-LLM's draft_len_schedule: one draft length for all requests, by batch size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from dcut_trt.errors import CostTableError, UnsupportedOption
from dcut_trt.spec.cost_table import CostTable


@dataclass(frozen=True, slots=True)
class UniformDepth:
    """What is best at one captured batch size when every request keeps `depth` drafts.

    tokens: expected per request and step, bonus token included.  cost_ms: of that step.
    """

    batch: int
    depth: int
    tokens: float
    cost_ms: float

    @property
    def tokens_per_ms(self) -> float:
        return self.batch * self.tokens / self.cost_ms


def check_acceptance(acceptance: Sequence[float], draft_length: int) -> None:
    """acceptance: [D] probability that the first k drafts are all accepted, for k = 1..D. Raises UnsupportedOption."""
    shown = ",".join(f"{value:g}" for value in acceptance)
    if len(acceptance) != draft_length:
        raise UnsupportedOption(f"acceptance={shown}: the drafter drafts {draft_length} tokens, so as many are needed")
    falling = [1.0, *acceptance, 0.0]
    if not all(before >= after for before, after in pairwise(falling)):
        raise UnsupportedOption(f"acceptance={shown}: must fall from depth to depth, within [0, 1]")


def measured_acceptance(report: Mapping[str, Any]) -> list[float]:
    """[D] as the policy dflash had it in the JSON report of dcut-trt bench: over all its cells, by number of blocks.

    It verifies every draft, so no selection hides what would have been accepted. Raises UnsupportedOption when no cell
    has it.
    """
    cells = [cell for cell in report["cells"] if cell["policy"] == "dflash" and cell.get("acceptance")]
    if not cells:
        raise UnsupportedOption("the report of dcut-trt bench has no acceptance of policy dflash; measure that policy")
    blocks = [cell["steps"] * cell["mean_batch"] for cell in cells]
    mean: list[float] = np.average([cell["acceptance"] for cell in cells], axis=0, weights=blocks).tolist()
    return mean


def uniform_depths(table: CostTable, acceptance: Sequence[float]) -> list[UniformDepth]:
    """The depth with the most expected tokens per millisecond at every captured batch; the shallower of equals.

    None is deeper than that of the smallest batch: TensorRT-LLM takes that one for its max_draft_len.
    """
    chosen: list[UniformDepth] = []
    for row, batch in enumerate(table.batches):
        options = [
            UniformDepth(batch, depth, 1.0 + sum(acceptance[:depth]), cost_ms)
            for depth, cost_ms in enumerate(depth_costs(table, row, len(acceptance)))
            if not chosen or depth <= chosen[0].depth
        ]
        chosen.append(max(options, key=lambda option: option.tokens_per_ms))
    return chosen


def depth_costs(table: CostTable, row: int, draft_length: int) -> list[float]:
    """Milliseconds of a step that keeps 0, 1, .. drafts per request, up to the largest measured ratio.

    Depth d is the ratio (d + 1) / (D + 1), between measured ratios on a straight line. Below the smallest the cost is
    that of the smallest, which no shallower step exceeds. Depth 0 does not draft at all.
    Raises CostTableError when that was not measured.
    """
    if table.plain_ms is None:
        raise CostTableError("the cost table has no plain_ms, the cost of steps without drafting; measure it anew")
    ratios, costs = np.array(table.ratios), table.cost_ms[row]
    order = np.argsort(ratios)
    depths = [depth for depth in range(1, draft_length + 1) if (depth + 1) / (draft_length + 1) <= ratios.max() + 1e-9]
    wanted = [(depth + 1) / (draft_length + 1) for depth in depths]
    return [float(table.plain_ms[row]), *np.interp(wanted, ratios[order], costs[order]).tolist()]


def schedule(depths: Sequence[UniformDepth]) -> dict[int, int]:
    """Largest batch size -> draft length, with equal neighbours merged; beyond the last TensorRT-LLM drafts nothing."""
    merged: dict[int, int] = {}
    for place, entry in enumerate(depths):
        if place + 1 == len(depths) or depths[place + 1].depth != entry.depth:
            merged[entry.batch] = entry.depth
    return merged


def to_yaml(depths: Sequence[UniformDepth], drafter: str, source: str) -> str:
    """The options file of trtllm-serve. Raises UnsupportedOption when drafting never pays at the smallest batch."""
    if depths[0].depth == 0:
        raise UnsupportedOption(
            f"at batch {depths[0].batch} plain decoding is fastest, so there is no draft length to export; "
            "serve without speculative_config"
        )
    by_batch = {entry.batch: entry for entry in depths}
    lines = [
        f"# Written by dcut-trt export-schedule from {' '.join(source.split())}.",
        "# Each key is the largest batch size of its draft length; above the last one nothing is drafted.",
        "speculative_config:",
        "  decoding_type: DFlash",
        f"  speculative_model: {json.dumps(drafter)}",
        f"  max_draft_len: {depths[0].depth}",
        "  draft_len_schedule:",
    ]
    for batch, depth in schedule(depths).items():
        entry = by_batch[batch]
        lines.append(f"    {batch}: {depth}  # {entry.tokens:.2f} tokens per request in {entry.cost_ms:.3f} ms")
    return "\n".join(lines) + "\n"
