"""Log probabilities of the target's raw logits."""

from __future__ import annotations

import numpy as np

from dcut_trt.sampling import best_ids
from dcut_trt.types import FloatArray, TokenLogprob


def token_logprob(logits: FloatArray, token_id: int, top: int) -> TokenLogprob:
    """Natural log softmax, in float64, of one token and of the `top` most probable ones.

    logits: [V] raw; a finite maximum.  top: 0 (none) or more; ties go by id.
    """
    wide = logits.astype(np.float64)
    peak = wide.max()
    total = peak + np.log(np.exp(wide - peak).sum())
    best = ((int(best_id), float(wide[best_id] - total)) for best_id in best_ids(logits, top).tolist())
    return TokenLogprob(token_id, float(wide[token_id] - total), tuple(best))
