"""Prefix product against the fitted score on a recorded trace, each draft scored before it is learnt from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcut_server.simulate.quality import auroc, expected_calibration_error, spearman, tokens_verified
from dcut_server.simulate.traces import Trace
from dcut_trt.spec.packing import budget
from dcut_trt.spec.score import AcceptanceScore
from dcut_trt.spec.selector import prefix_log_scores
from dcut_trt.stage_types import BatchView, Draft, Intent, StepOutcome
from dcut_trt.types import FloatArray, IntArray

Places = NDArray[np.signedinteger[Any]]

RATIOS = (0.2, 0.25, 0.375, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class ScoreQuality:
    """spearman, auroc, calibration_error: over drafts of known fate.  tokens_per_row: at each of RATIOS."""

    spearman: float
    auroc: float
    calibration_error: float
    tokens_per_row: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TraceQuality:
    """blocks: scored.  tokens: per step and request when whole blocks are verified."""

    name: str
    blocks: int
    tokens: float
    prefix: ScoreQuality
    fitted: ScoreQuality


def trace_quality(trace: Trace, live: int = 8) -> TraceQuality:
    """Verify whole blocks of `live` requests at a time, each text once from its start; a text that ends makes room."""
    score = AcceptanceScore(trace.draft_length)
    places = trace.starts[:live].copy()
    requests = np.arange(len(places))
    coming = live
    steps: list[tuple[FloatArray, FloatArray, IntArray, IntArray]] = []
    while len(places):
        view, draft = _view(trace, requests, places), _draft(trace, places)
        accepted, judged = trace.accepted[places], trace.judged[places]
        steps.append((prefix_log_scores(draft.confidence), score.log_scores(draft, view, None), accepted, judged))
        score.learn(_whole(view, draft, accepted, judged))
        places = places + accepted + 1
        for slot in np.flatnonzero(places >= trace.starts[requests + 1]):
            if coming < trace.requests:
                requests[slot], places[slot] = coming, trace.starts[coming]
                coming += 1
        staying = places < trace.starts[requests + 1]
        requests, places = requests[staying], places[staying]
    prefix, fitted, accepted_all, judged_all = (list(column) for column in zip(*steps, strict=True))
    accepted = np.concatenate(accepted_all)
    return TraceQuality(
        name=trace.name,
        blocks=len(accepted),
        tokens=float(accepted.mean()) + 1,
        prefix=_quality(prefix, accepted_all, judged_all),
        fitted=_quality(fitted, accepted_all, judged_all),
    )


def _quality(scores: list[FloatArray], accepted: list[IntArray], judged: list[IntArray]) -> ScoreQuality:
    log_scores, counts, known_counts = (np.concatenate(parts) for parts in (scores, accepted, judged))
    depths = np.arange(1, log_scores.shape[1])
    # After a rejected draft all are rejected; at the end of a text nothing is known of the rest.
    known = (depths <= known_counts[:, None]) | (known_counts > counts)[:, None]
    labels = (depths <= counts[:, None])[known]
    drafts = log_scores[:, 1:][known].astype(np.float64)
    return ScoreQuality(
        spearman=spearman(drafts, labels.astype(np.float64)),
        auroc=auroc(drafts, labels),
        calibration_error=expected_calibration_error(np.exp(drafts), labels),
        tokens_per_row=tuple(_tokens_per_row(scores, accepted, ratio) for ratio in RATIOS),
    )


def _tokens_per_row(scores: list[FloatArray], accepted: list[IntArray], ratio: float) -> float:
    sizes = [budget(ratio, *step.shape) for step in scores]
    tokens = [tokens_verified(step, labels, size) for step, labels, size in zip(scores, accepted, sizes, strict=True)]
    return sum(tokens) / sum(sizes)


def _view(trace: Trace, requests: Places, places: Places) -> BatchView:
    return BatchView(
        request_ids=tuple(str(request) for request in requests.tolist()),
        context_lens=(trace.prompt_lens[requests] + places - trace.starts[requests]).astype(np.int32),
        pending_rows=np.zeros(len(requests), np.int32),
        temperatures=trace.temperatures[requests],
        last_tokens=None if trace.last_tokens is None else trace.last_tokens[places],
    )


def _draft(trace: Trace, places: Places) -> Draft:
    tokens = np.zeros((len(places), trace.draft_length), np.int32) if trace.tokens is None else trace.tokens[places]
    return Draft(tokens, trace.confidence[places], margin=None if trace.margin is None else trace.margin[places])


def _whole(view: BatchView, draft: Draft, accepted: IntArray, judged: IntArray) -> StepOutcome:
    keep = np.full(view.batch, draft.confidence.shape[1], np.int32)
    rows = int(keep.sum()) + view.batch
    return StepOutcome(view, Intent(), draft, None, keep, accepted, judged, rows, 0.0, 0.0, 0.0)
