"""What one whole step costs on this machine, by batch size and ratio."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dcut_trt.errors import CostTableError

COST_TABLE_NAME = "cost_table.json"  # inside a bundle, beside the manifest

# Below this spread between the cheapest and the dearest ratio at the largest batch, the table cannot tell them apart.
FLAT_SPREAD = 1.05


@dataclass(frozen=True)
class CostTable:
    """Median milliseconds of a step (draft, select, pack, verify, accept) at captured batch sizes.

    batches: captured B, ascending.  ratios: [R].  cost_ms: [len(batches), R].  plain_ms: [len(batches)], a step
    without drafting.  fingerprint: bundle, machine and runtime that were measured.  measured_at: ISO 8601.
    state: measured | loaded | flat (all ratios cost the same) | stale (measured elsewhere).
    """

    batches: tuple[int, ...]
    ratios: tuple[float, ...]
    cost_ms: NDArray[np.float64]
    plain_ms: NDArray[np.float64]
    fingerprint: str
    measured_at: str
    state: str = "measured"

    def __post_init__(self) -> None:
        shape = (len(self.batches), len(self.ratios))
        if self.cost_ms.shape != shape or self.plain_ms.shape != shape[:1] or 0 in shape:
            raise CostTableError(f"cost_ms {self.cost_ms.shape}, plain_ms {self.plain_ms.shape}: expected {shape}")
        if list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise CostTableError(f"batches={self.batches}: must be ascending and at least 1")
        if any(not 0 < ratio <= 1 for ratio in self.ratios):
            raise CostTableError(f"ratios={self.ratios}: must be in (0, 1]")
        for name, values in (("cost_ms", self.cost_ms), ("plain_ms", self.plain_ms)):
            if not (np.isfinite(values).all() and (values > 0).all()):
                raise CostTableError(f"{name}={values.tolist()}: every entry must be finite and positive")

    def row(self, batch: int) -> NDArray[np.float64]:
        """cost_ms [R] at the captured batch nearest to `batch`; a tie goes to the smaller."""
        nearest = min(range(len(self.batches)), key=lambda index: abs(self.batches[index] - batch))
        row: NDArray[np.float64] = self.cost_ms[nearest]
        return row

    @property
    def flat(self) -> bool:
        """True when the ratios cost the same even at the largest batch, where they differ most."""
        return bool(self.cost_ms[-1].max() < FLAT_SPREAD * self.cost_ms[-1].min())

    def with_state(self, state: str) -> CostTable:
        return dataclasses.replace(self, state=state)


def save_cost_table(table: CostTable, path: Path) -> None:
    """Write the table as JSON, atomically."""
    raw = {
        "batches": table.batches,
        "ratios": table.ratios,
        "cost_ms": np.round(table.cost_ms, 4).tolist(),
        "plain_ms": np.round(table.plain_ms, 4).tolist(),
        "fingerprint": table.fingerprint,
        "measured_at": table.measured_at,
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def load_cost_table(path: Path, fingerprint: str) -> CostTable:
    """Read a saved table; its state is "stale" when it was measured under another fingerprint.

    Raises CostTableError when the file cannot be read or holds impossible values.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        table = CostTable(
            batches=tuple(int(batch) for batch in raw["batches"]),
            ratios=tuple(float(ratio) for ratio in raw["ratios"]),
            cost_ms=np.array(raw["cost_ms"], np.float64),
            plain_ms=np.array(raw["plain_ms"], np.float64),
            fingerprint=str(raw["fingerprint"]),
            measured_at=str(raw["measured_at"]),
        )
    except CostTableError as error:
        raise CostTableError(f"{path}: {error}") from error
    except (OSError, ValueError, OverflowError, KeyError, TypeError) as error:
        raise CostTableError(f"{path}: not a cost table: {error!r}") from error
    if table.fingerprint != fingerprint:
        return table.with_state("stale")
    return table.with_state("flat" if table.flat else "loaded")
