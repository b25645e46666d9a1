"""What dcut::ConfidenceTopKPack takes and gives; reference, ONNX function and kernel all keep to this page.

B requests, D drafts each, R budgets. N = B * (D + 1) is both the number of candidates and K_max, the length of the
packed outputs. Scores are float32 running sums of log confidence; NaN confidence counts as 0, and values outside [0, 1]
are clipped. Ties go to the smaller depth, then the smaller row. A budget's expected tokens are the sum of exp(score)
over the candidates that it holds.

  packed row:      0    1    2    3    4    5    6    7 ..       K = 7 of K_max
  request_rows:    0    0    0    1    2    2    2    0 ..       keep = [2, 0, 2]
  depths:          0    1    2    0    0    1    2    0 ..       subsequence_begins = [0, 3, 4, 7]

Rows K .. K_max - 1 are zero in all four packed outputs: token 0 at position 0, depth 0 of request 0. A target graph may
run over any K' >= K of them: it lets no request's row see a row past subsequence_begins[B] (docs/graphs.md).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from dcut_trt.errors import UnsupportedOption
from dcut_trt.types import FloatArray, IntArray

DOMAIN, NAME, VERSION = "dcut", "ConfidenceTopKPack", "1"
PLUGIN_ID = f"{DOMAIN}::{NAME}"

MAX_POSITIONS = 4096  # N: one block of 1024 threads, four candidates each, all of them in shared memory
MAX_BUDGETS = 32


@dataclass(frozen=True, slots=True)
class PackInputs:
    """The inputs, in the order of the node's.

    tokens: [B, D] drafted ids.  confidence: [B, D] probability of each.
    anchors: [B] last committed token of each request.  anchor_positions: [B] where it stands in its request.
    budgets: [R] rows to verify per bucket; one outside [B, N] counts as the nearer end.
    cost_ms: [R] milliseconds of a step per bucket; one that is not positive and finite rules its bucket out.
    bypass: [1] not 0 to keep the anchors alone.
    """

    tokens: IntArray
    confidence: FloatArray
    anchors: IntArray
    anchor_positions: IntArray
    budgets: IntArray
    cost_ms: FloatArray
    bypass: IntArray

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """By input name, contiguous, as a runtime binds them."""
        return {name: np.ascontiguousarray(getattr(self, name)) for name in INPUTS}


@dataclass(frozen=True, slots=True)
class Packed:
    """The outputs, in the order of the node's; all i32, named as the target graph's inputs are.

    bucket: [1] the budget with the most expected tokens per millisecond, the first of equals. R - 1 when every cost
    is ruled out: verify most. R when bypassed: K = B, and every keep is 0.
    keep: [B] drafts kept per request.  subsequence_begins: [B + 1] first packed row of each request, then K.
    token_ids, request_rows, depths, positions: [K_max] the packed rows, position = anchor's + depth.
    """

    bucket: IntArray
    keep: IntArray
    subsequence_begins: IntArray
    token_ids: IntArray
    request_rows: IntArray
    depths: IntArray
    positions: IntArray


INPUTS = tuple(field.name for field in fields(PackInputs))
OUTPUTS = tuple(field.name for field in fields(Packed))


def check_limits(batch: int, length: int, budgets: int) -> None:
    """Raises UnsupportedOption when the kernel cannot hold B * (D + 1) candidates or R budgets."""
    positions = batch * (length + 1)
    if batch < 1 or length < 1 or positions > MAX_POSITIONS:
        raise UnsupportedOption(
            f"batch={batch}, draft length={length}: B * (D + 1) = {positions} must be in 2..{MAX_POSITIONS}"
        )
    if not 1 <= budgets <= MAX_BUDGETS:
        raise UnsupportedOption(f"budgets={budgets}: must be in 1..{MAX_BUDGETS}")
