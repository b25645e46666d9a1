"""What the paper reports of a drafter's blocks, taken from a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcut_server.simulate.quality import auroc, spearman
from dcut_server.simulate.traces import Trace
from dcut_trt.spec.selector import prefix_log_scores


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    """tokens: accepted drafts and the target's own token, when whole blocks are verified.

    spearman, auroc: of prefix products against whether the draft and all before it are right, over all drafts.
    """

    tokens: float
    spearman: float
    auroc: float


def whole_blocks(trace: Trace) -> NDArray[np.int64]:
    """Positions at which the fate of every draft of the block is known."""
    return np.flatnonzero((trace.judged > trace.accepted) | (trace.judged == trace.draft_length))


def visited_blocks(trace: Trace) -> NDArray[np.int64]:
    """Positions that verifying whole blocks comes by, from the start of each text, of those with a known fate."""
    visited = []
    for start, end in zip(trace.starts[:-1].tolist(), trace.starts[1:].tolist(), strict=True):
        place = start
        while place < end:
            visited.append(place)
            place += int(trace.accepted[place]) + 1
    return np.intersect1d(np.array(visited, np.int64), whole_blocks(trace))


def block_statistics(trace: Trace, places: NDArray[np.int64]) -> BlockStatistics:
    """Of the blocks at these positions."""
    accepted = trace.accepted[places]
    labels = (np.arange(1, trace.draft_length + 1) <= accepted[:, None]).ravel()
    scores = prefix_log_scores(trace.confidence[places])[:, 1:].ravel()
    return BlockStatistics(
        tokens=float(accepted.mean()) + 1,
        spearman=spearman(scores, labels.astype(np.float64)),
        auroc=auroc(scores, labels),
    )
