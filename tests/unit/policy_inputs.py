"""Drafts and batches for policies that are tried without an engine."""

import numpy as np

from dcut_trt.spec.policy import Policy
from dcut_trt.stage_types import BatchView, Draft, Selection


def view_of(batch: int, context: int = 100) -> BatchView:
    rows = np.full(batch, context, np.int32)
    ids = tuple(f"request-{row}" for row in range(batch))
    return BatchView(ids, rows, np.ones(batch, np.int32), np.zeros(batch, np.float32))


def draft_of(confidence: np.ndarray) -> Draft:
    return Draft(np.zeros(confidence.shape, np.int32), confidence)


def selected(policy: Policy, confidence: np.ndarray) -> Selection:
    """What the policy keeps of drafts of this confidence [B, D]."""
    return policy.select(draft_of(confidence), view_of(len(confidence)))
