"""`python -m dcut_server.simulate.fit`: find generators with the statistics that the paper reports, and ship them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from dcut_server.simulate.generator import Shape, generate
from dcut_server.simulate.paper import BLOCKS, DRAFT_LENGTH, POSITIONS, REQUESTS
from dcut_server.simulate.statistics import BlockStatistics, block_statistics, visited_blocks
from dcut_server.simulate.traces import Trace

FITTED = Path(__file__).parent / "fitted.json"

# What three statistics cannot tell apart; Table 2 hardly depends on it. Level and block spread are fitted.
START = Shape(level=0.0, decay=0.1, request_spread=0.3, block_spread=3.0, draft_spread=1.0, noise=0.7)
_HALVINGS = 11


def fit(wanted: BlockStatistics, requests: int = REQUESTS, positions: int = POSITIONS) -> tuple[Shape, BlockStatistics]:
    """A shape and what it reaches: the level sets the mean accepted tokens, the block spread the AUROC.

    Spearman's correlation with a yes-or-no label follows from the two: (AUROC - 1/2) * sqrt(12 q (1 - q)), where q is
    the share of accepted drafts; the published three agree with that.
    """

    def drawn(shape: Shape) -> Trace:
        return generate(shape, draft_length=DRAFT_LENGTH, requests=requests, positions=positions, seed=0)

    def at_spread(spread: float) -> Shape:
        def too_many(level: float) -> bool:
            trace = drawn(dataclasses.replace(START, block_spread=spread, level=level))
            return float(trace.accepted[visited_blocks(trace)].mean()) + 1 > wanted.tokens

        return dataclasses.replace(START, block_spread=spread, level=_bisect(too_many, -4.0, 4.0))

    def measured(shape: Shape) -> BlockStatistics:
        trace = drawn(shape)
        return block_statistics(trace, visited_blocks(trace))

    spread = _bisect(lambda spread: measured(at_spread(spread)).auroc > wanted.auroc, 0.5, 6.0)
    shape = at_spread(spread)
    return shape, measured(shape)


def _bisect(above: Callable[[float], bool], low: float, high: float) -> float:
    """Where an increasing condition turns true."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return round((low + high) / 2, 3)


def main() -> None:
    """Write the shape of every dataset with what it reaches, and print both."""
    fitted = {}
    for name, wanted in BLOCKS.items():
        shape, reached = fit(wanted)
        fitted[name] = {"shape": dataclasses.asdict(shape), "reaches": dataclasses.asdict(reached)}
        print(f"{name}: {shape}: {reached}, wanted {wanted}")
    FITTED.write_text(json.dumps(fitted, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
