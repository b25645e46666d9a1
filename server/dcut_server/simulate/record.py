"""Record a drafter's blocks after every token of real answers: what a simulation replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcut_server.bench.runner import serve
from dcut_server.simulate.traces import Trace, TraceError
from dcut_trt.engine import Engine
from dcut_trt.errors import UnsupportedOption
from dcut_trt.spec.policy import Steady
from dcut_trt.stage_types import BatchView, Draft, Selection
from dcut_trt.types import FloatArray, IntArray, Request


@dataclass(slots=True)
class _Blocks:
    """What was drafted for one request, in the order of its tokens."""

    tokens: list[IntArray] = field(default_factory=list)
    confidence: list[FloatArray] = field(default_factory=list)
    margin: list[FloatArray] = field(default_factory=list)
    last_tokens: list[IntArray] = field(default_factory=list)


class Recorder(Steady):
    """Drafts whole blocks and verifies none of them: each step commits one token, so a block begins at each.

    The target's own tokens do not depend on what is drafted, so that the finished answer tells of every block how many
    of its drafts would have been accepted.
    """

    name = "record"

    def __init__(self) -> None:
        self.blocks: dict[str, _Blocks] = {}

    def select(self, draft: Draft, view: BatchView) -> Selection:
        for row, request_id in enumerate(view.request_ids):
            blocks = self.blocks.setdefault(request_id, _Blocks())
            blocks.tokens.append(draft.tokens[row].copy())
            blocks.confidence.append(draft.confidence[row].copy())
            if draft.margin is not None:
                blocks.margin.append(draft.margin[row].copy())
            if view.last_tokens is not None:
                blocks.last_tokens.append(view.last_tokens[row].copy())
        return Selection(np.zeros(view.batch, np.int32), None)


def record_trace(engine: Engine, requests: Sequence[Request], concurrency: int, name: str, source: str) -> Trace:
    """Serve all requests and return a block for every token of each answer but the last.

    The engine must be idle. Raises the error that a request ends with, UnsupportedOption for an engine that selects on
    its device, and TraceError when no answer has two tokens.
    """
    if not engine.limits.any_budget:
        raise UnsupportedOption("record: needs an engine that runs any number of rows, such as backend openvino")
    served, recorder = engine.policy, Recorder()
    engine.policy = recorder
    try:
        streams = serve(engine, requests, concurrency, recorder.name).streams
    finally:
        if not engine.has_work:
            engine.policy = served
    answered = [
        (request, recorder.blocks[request.request_id], np.array(stream.tokens, np.int32))
        for request, stream in zip(requests, streams, strict=True)
        if request.request_id in recorder.blocks
    ]
    if not answered:
        raise TraceError("requests: no answer has two tokens, so nothing was drafted")
    return _trace(answered, name, source)


def _trace(answered: Sequence[tuple[Request, _Blocks, IntArray]], name: str, source: str) -> Trace:
    labels = [accepted_drafts(np.stack(blocks.tokens), answer) for _, blocks, answer in answered]
    margins = _stacked([margin for _, blocks, _ in answered for margin in blocks.margin])
    lengths = [len(blocks.tokens) for _, blocks, _ in answered]
    return Trace(
        name=name,
        source=source,
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_lens=np.array([len(request.prompt_ids) for request, _, _ in answered], np.int32),
        temperatures=np.array([request.sampling.temperature for request, _, _ in answered], np.float32),
        confidence=np.concatenate([np.stack(blocks.confidence) for _, blocks, _ in answered]).astype(np.float32),
        accepted=np.concatenate([accepted for accepted, _ in labels]),
        judged=np.concatenate([judged for _, judged in labels]),
        margin=margins,
        tokens=np.concatenate([np.stack(blocks.tokens) for _, blocks, _ in answered]).astype(np.int32),
        last_tokens=_stacked([words for _, blocks, _ in answered for words in blocks.last_tokens]),
    )


def accepted_drafts(tokens: IntArray, answer: IntArray) -> tuple[IntArray, IntArray]:
    """How many leading drafts of each block [n, D] are the answer's next tokens, and of how many that is known: [n].

    answer: [n + 1] tokens; block i was drafted when answer[: i + 1] was committed.
    """
    count, length = tokens.shape
    places = np.arange(count)[:, None] + np.arange(1, length + 1)  # [n, D] of the token that each draft stands for
    known = places < len(answer)
    right = known & (tokens == answer[np.minimum(places, len(answer) - 1)])
    accepted = np.cumprod(right, axis=1).sum(axis=1).astype(np.int32)
    judged = np.minimum(accepted + 1, known.sum(axis=1)).astype(np.int32)
    return accepted, judged


def _stacked(rows: list[NDArray[Any]]) -> NDArray[Any] | None:
    return np.stack(rows) if rows else None
