"""The cost tables that a simulation may run over: the paper's two, or one that was profiled here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcut_trt.spec.cost_table import CostTable, load_cost_table

SHIPPED = ("h20", "h800")
_FOLDER = Path(__file__).parent / "costs"


@dataclass(frozen=True)
class Costs:
    """name: as it was asked for.  source: where the table is from."""

    name: str
    source: str
    table: CostTable


def load_costs(name: str) -> Costs:
    """A shipped table by name, or a cost_table.json of the profiler. Raises CostTableError."""
    if name not in SHIPPED:
        table = load_cost_table(Path(name).expanduser(), fingerprint="")
        return Costs(name, f"{table.fingerprint}, measured {table.measured_at}", table.with_state("loaded"))
    raw = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    table = CostTable(
        batches=tuple(raw["batches"]),
        ratios=tuple(raw["ratios"]),
        cost_ms=np.array(raw["cost_ms"], np.float64),
        plain_ms=None,
        fingerprint=name,
        measured_at="",
        state="loaded",
    )
    return Costs(name, raw["source"], table)
