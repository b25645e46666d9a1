"""Turn a keep depth per request into the dense rows that the target computes."""

from __future__ import annotations

import math

import numpy as np

from dcut_trt.stage_types import PackPlan
from dcut_trt.types import IntArray

# Products such as 0.7 * 10 land a hair above the integer they mean; without this the ceiling would be one too high.
_ROUNDING_SLACK = 1e-9


def budget(ratio: float, batch: int, block: int) -> int:
    """K_rho(B) = max(B, ceil(rho * B * (D + 1))): rows to verify at this ratio (paper, Section 3.2).

    ratio: in (0, 1].  batch: B >= 1 requests.  block: D + 1 positions per request.
    """
    return max(batch, math.ceil(ratio * batch * block - _ROUNDING_SLACK))


def token_buckets(ratios: tuple[float, ...], batches: tuple[int, ...], block: int) -> tuple[int, ...]:
    """All distinct K over the captured batches and ratios, ascending."""
    return tuple(sorted({budget(ratio, batch, block) for batch in batches for ratio in ratios}))


def captured_batches(max_batch: int) -> tuple[int, ...]:
    """The batch sizes a cost table is measured at: powers of two up to max_batch, and max_batch."""
    powers = [1 << exponent for exponent in range(max_batch.bit_length()) if 1 << exponent <= max_batch]
    return tuple(sorted({*powers, max_batch}))


def block_depths(draft_length: int) -> tuple[int, ...]:
    """The depths, up to draft_length, at which a block may end where the drafter allows short ones."""
    return (*(depth for depth in (1, 2, 4) if depth < draft_length), draft_length)


def pack(anchors: IntArray, tokens: IntArray, keep: IntArray, ratio: float | None = None) -> PackPlan:
    """Pack each anchor and its kept drafts densely, request by request.

    #  packed row:      0    1    2    3    4    5    6        K = 7
    #  request:         a    a    a    b    c    c    c        cu_lens = [0, 3, 4, 7]
    #  depth:           0    1    2    0    0    1    2        keep = [2, 0, 2]

    anchors: [B] last committed tokens.  tokens: [B, D] drafts.  keep: [B], 0 <= keep <= D.
    """
    batch = len(anchors)
    lengths = keep + 1  # [B]
    cu_lens = np.zeros(batch + 1, np.int32)
    np.cumsum(lengths, out=cu_lens[1:])
    request_rows = np.repeat(np.arange(batch, dtype=np.int32), lengths)  # [K]
    depths = np.arange(cu_lens[-1], dtype=np.int32) - cu_lens[request_rows]  # [K]
    block = np.empty((batch, tokens.shape[1] + 1), np.int32)  # [B, D + 1]
    block[:, 0], block[:, 1:] = anchors, tokens
    return PackPlan(keep, block[request_rows, depths], request_rows, depths, cu_lens, ratio)
