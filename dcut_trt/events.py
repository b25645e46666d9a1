"""The messages of a stream, from what happened to its sequence."""

from __future__ import annotations

from dcut_trt.errors import DeadlineExceeded
from dcut_trt.scheduler import Batch
from dcut_trt.sequence import Sequence
from dcut_trt.types import Commit, FinishReason, StepEvent


def commit_event(sequence: Sequence, commit: Commit, now: float) -> StepEvent:
    """The delta of one step."""
    return StepEvent(
        commit.request_id,
        commit.tokens,
        commit.text,
        sequence.usage,
        commit.finish,
        logprobs=commit.logprobs,
        matched=commit.matched,
        times=None if commit.finish is None else sequence.times(now),
    )


def fault_event(sequence: Sequence, error: Exception, now: float) -> StepEvent:
    """The end of a stream whose request failed."""
    return StepEvent(sequence.request.request_id, (), "", sequence.usage, error=error, times=sequence.times(now))


def leave_events(batch: Batch, now: float) -> list[StepEvent]:
    """The last event of everyone who left before this step."""
    aborted = [
        StepEvent(sequence.request.request_id, (), "", sequence.usage, FinishReason.ABORTED, times=sequence.times(now))
        for sequence in batch.cancelled
    ]
    expired = [
        fault_event(sequence, DeadlineExceeded(f"deadline passed after {sequence.output_length} output tokens"), now)
        for sequence in batch.expired
    ]
    return aborted + expired
