"""What one whole step costs on this machine, by batch size and ratio."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dcut_trt.errors import CostTableError

COST_TABLE_NAME = "cost_table.json"  # inside a bundle, beside the manifest

# Below this spread between the cheapest and the dearest ratio at the largest batch, the table cannot tell them apart.
FLAT_SPREAD = 1.05

Value = TypeVar("Value")

_TIMES = ("cost_ms", "plain_ms", "draft_ms")


@dataclass(frozen=True, slots=True)
class ContextCost:
    """Milliseconds that 1,000 more rows of context per request add to a step.

    plain: for each request of a step without drafting.  request, row: for each request of a drafting step, and for
    each of its K rows. Attention with one row per request may be another kernel, which is why plain stands apart.
    """

    plain: float
    request: float
    row: float

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in (self.plain, self.request, self.row)):
            raise CostTableError(f"context_ms={self}: must be finite and not negative")


@dataclass(frozen=True)
class CostTable:
    """Median milliseconds of a step (draft, select, pack, verify, accept) at captured batch sizes.

    batches: captured B, ascending.  ratios: [R].  cost_ms: [len(batches), R].  fingerprint: bundle, machine and
    runtime that were measured.  measured_at: ISO 8601.
    state: measured | loaded | flat (all ratios cost the same) | stale (measured elsewhere).

    None where it was not measured:
    plain_ms: [len(batches)] a step without drafting.
    depths: block depths, ascending, the last one D.  draft_ms: [len(batches), len(depths)] the drafter's pass alone.
    context_ms: what a longer context adds.
    context_rows: mean rows of context per request behind cost_ms and plain_ms.
    switch_ms: what a call of the target costs more when it runs another number of rows than the last one did.
    """

    batches: tuple[int, ...]
    ratios: tuple[float, ...]
    cost_ms: NDArray[np.float64]
    plain_ms: NDArray[np.float64] | None
    fingerprint: str
    measured_at: str
    state: str = "measured"
    depths: tuple[int, ...] | None = None
    draft_ms: NDArray[np.float64] | None = None
    context_ms: ContextCost | None = None
    context_rows: float | None = None
    switch_ms: float | None = None

    def __post_init__(self) -> None:
        batches, ratios = len(self.batches), len(self.ratios)
        _check_times("cost_ms", self.cost_ms, (batches, ratios))
        if list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise CostTableError(f"batches={self.batches}: must be ascending and at least 1")
        if any(not 0 < ratio <= 1 for ratio in self.ratios):
            raise CostTableError(f"ratios={self.ratios}: must be in (0, 1]")
        if self.plain_ms is not None:
            _check_times("plain_ms", self.plain_ms, (batches,))
        if (self.depths is None) != (self.draft_ms is None):
            raise CostTableError("depths, draft_ms: one needs the other")
        if self.depths is not None and self.draft_ms is not None:
            if list(self.depths) != sorted(set(self.depths)) or 0 in (len(self.depths), *self.depths[:1]):
                raise CostTableError(f"depths={self.depths}: must be ascending and at least 1")
            _check_times("draft_ms", self.draft_ms, (batches, len(self.depths)), zero=True)
        for name, value in (("context_rows", self.context_rows), ("switch_ms", self.switch_ms)):
            if value is not None and not 0 <= value < math.inf:
                raise CostTableError(f"{name}={value}: must be finite and not negative")

    def row(self, batch: int) -> NDArray[np.float64]:
        """cost_ms [R] at the captured batch nearest to `batch`."""
        row: NDArray[np.float64] = self.cost_ms[self.nearest(batch)]
        return row

    def nearest(self, batch: int) -> int:
        """Index of the captured batch nearest to `batch`; a tie goes to the smaller."""
        return min(range(len(self.batches)), key=lambda index: abs(self.batches[index] - batch))

    @property
    def flat(self) -> bool:
        """True when the ratios cost the same even at the largest batch, where they differ most."""
        return bool(self.cost_ms[-1].max() < FLAT_SPREAD * self.cost_ms[-1].min())

    @property
    def bare(self) -> CostTable:
        """What steps cost by batch size and ratio, and nothing else that was measured."""
        return dataclasses.replace(self, depths=None, draft_ms=None, context_ms=None, context_rows=None, switch_ms=None)

    def with_state(self, state: str) -> CostTable:
        return dataclasses.replace(self, state=state)


def _check_times(name: str, values: NDArray[np.float64], shape: tuple[int, ...], *, zero: bool = False) -> None:
    if values.shape != shape or 0 in shape:
        raise CostTableError(f"{name} {values.shape}: expected {shape}, none of them 0")
    if not (np.isfinite(values).all() and (values >= 0 if zero else values > 0).all()):
        least = "not negative" if zero else "positive"
        raise CostTableError(f"{name}={values.tolist()}: every entry must be finite and {least}")


def save_cost_table(table: CostTable, path: Path) -> None:
    """Write the table as JSON, atomically."""
    raw = dataclasses.asdict(table)
    del raw["state"]  # it is of the reader, not of the file
    raw |= {name: np.round(raw[name], 4).tolist() for name in _TIMES if raw[name] is not None}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def load_cost_table(path: Path, fingerprint: str) -> CostTable:
    """Read a saved table; its state is "stale" when it was measured under another fingerprint.

    Raises CostTableError when the file cannot be read or holds impossible values.
    """
    try:
        table = _parse(json.loads(path.read_text(encoding="utf-8")))
    except CostTableError as error:
        raise CostTableError(f"{path}: {error}") from error
    except (OSError, ValueError, OverflowError, KeyError, TypeError) as error:
        raise CostTableError(f"{path}: not a cost table: {error!r}") from error
    if table.fingerprint != fingerprint:
        return table.with_state("stale")
    return table.with_state("flat" if table.flat else "loaded")


def _parse(raw: Mapping[str, Any]) -> CostTable:
    def optional(name: str, read: Callable[[Any], Value]) -> Value | None:
        return None if raw.get(name) is None else read(raw[name])

    return CostTable(
        batches=tuple(int(batch) for batch in raw["batches"]),
        ratios=tuple(float(ratio) for ratio in raw["ratios"]),
        cost_ms=_times(raw["cost_ms"]),
        plain_ms=None if raw["plain_ms"] is None else _times(raw["plain_ms"]),
        fingerprint=str(raw["fingerprint"]),
        measured_at=str(raw["measured_at"]),
        depths=optional("depths", lambda depths: tuple(int(depth) for depth in depths)),
        draft_ms=optional("draft_ms", _times),
        context_ms=optional("context_ms", lambda costs: ContextCost(**{name: float(costs[name]) for name in costs})),
        context_rows=optional("context_rows", float),
        switch_ms=optional("switch_ms", float),
    )


def _times(values: Any) -> NDArray[np.float64]:
    return np.array(values, np.float64)
