"""Prometheus metrics of one server: steps are counted in the engine's thread, requests in the event loop's."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from dcut_server.status import CODES, code_of
from dcut_trt.metrics import StepRecord
from dcut_trt.types import Commit, FinishReason, Request, RequestTimes, StepEvent, Usage

PREFIX = "dcut"
REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class RequestMetrics:
    """What each finished request adds. Observes requests (ops/observers.py)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def seconds(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"{PREFIX}_{name}_seconds", text, registry=registry, buckets=buckets)

        def total(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        self._first_token = seconds("time_to_first_token", "Submission to first token", REQUEST_SECONDS)
        self._per_token = seconds("time_per_output_token", "Mean time between a request's tokens", TOKEN_SECONDS)
        self._latency = seconds("e2e_request_latency", "Submission to last token", REQUEST_SECONDS)
        self._queue = seconds("request_queue_time", "Submission to the first step of the request", REQUEST_SECONDS)
        success = total("request_success", "Requests that ended without an error", ["finished_reason"])
        self._success = {reason: success.labels(reason.value) for reason in FinishReason}
        self._failure = total("request_failure", "Admitted requests that ended with an error", ["code"])
        refused = total("request_refused", "Calls for tokens that were turned away before they ran", ["code"])
        self._refused = {code: refused.labels(code.name) for code in {*CODES.values(), grpc.StatusCode.INTERNAL}}
        self._prompt = total("prompt_tokens", "Prompt tokens of the requests that ended")
        self._cached = total("prefix_cached_tokens", "Prompt tokens of those that the prefix cache held")

    def refused(self, error: Exception) -> None:
        self._refused[code_of(error)].inc()

    def submitted(self, request: Request) -> None:
        pass

    def published(self, events: Sequence[StepEvent]) -> None:
        for event in events:
            if event.final:
                self._ended(event)

    def _ended(self, event: StepEvent) -> None:
        self._prompt.inc(event.usage.prompt_tokens)
        self._cached.inc(event.usage.cached_tokens)
        if event.times is not None and event.times.admitted is not None:
            self._queue.observe(event.times.admitted - event.times.submitted)
        if event.error is not None:
            self._failure.labels(code_of(event.error).name).inc()
        elif event.finish is not None:
            self._success[event.finish].inc()
            if event.times is not None and event.finish is not FinishReason.ABORTED:
                self._time(event.times, event.usage)

    def _time(self, times: RequestTimes, usage: Usage) -> None:
        """Latencies of whole answers only: a stream that was cut would look fast."""
        if times.first_token is None or times.finished is None:
            return
        self._first_token.observe(times.first_token - times.submitted)
        self._latency.observe(times.finished - times.submitted)
        if usage.output_tokens > 1:
            self._per_token.observe((times.finished - times.first_token) / (usage.output_tokens - 1))


class StepMetrics:
    """What each step adds; observe() is the engine trace's listener. Every label is bound beforehand."""

    def __init__(self, registry: CollectorRegistry, draft_length: int) -> None:
        def seconds(name: str, text: str, label: str) -> Histogram:
            return Histogram(f"{PREFIX}_{name}_seconds", text, [label], registry=registry, buckets=STEP_SECONDS)

        def total(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        step = seconds("step", "Whole engine steps", "kind")
        self._step = {kind: step.labels(kind) for kind in ("decode", "prefill")}
        stage = seconds("step_stage", "Stages of decode steps", "stage")
        self._draft, self._select, self._verify = (stage.labels(name) for name in ("draft", "select", "verify"))
        self._generation = total("generation_tokens", "Output tokens")
        self._prefilled = total("prefilled_rows", "Prompt rows that the target computed")
        self._queries = total("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache")
        self._hits = total("prefix_cache_hits", "Prompt tokens that the prefix cache held")
        self._drafts = total("spec_decode_num_drafts", "Blocks drafted: one per request and step that drafts")
        self._drafted = total("spec_decode_num_draft_tokens", "Draft tokens proposed")
        self._verified = total("spec_decode_num_verified_tokens", "Draft tokens that the target verified")
        self._pruned = total("spec_decode_num_pruned_tokens", "Draft tokens pruned before the target ran")
        self._accepted = total("spec_decode_num_accepted_tokens", "Draft tokens emitted")
        at = total(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens emitted, by place in the block", ["position"]
        )
        self._accepted_at = [at.labels(str(position)) for position in range(draft_length)]
        self._kept_rows = total("kept_rows", "Rows that drafting steps sent to the target, K of the paper")
        self._possible_rows = total("possible_rows", "Rows that verifying every draft would have sent")
        self._ratio = total("chosen_ratio", "Drafting steps by the ratio that was chosen", ["ratio"])
        self._decode_steps = total("decode_steps", "Decode steps")
        self._bypass_steps = total("bypass_steps", "Decode steps without drafting")
        self._ratios: dict[float, Counter] = {}

    def observe(self, record: StepRecord, commits: Sequence[Commit]) -> None:
        """Called in the engine's thread."""
        self._step[record.kind].observe(record.step_ms / 1e3)
        self._generation.inc(record.emitted)
        if record.kind == "prefill":
            self._prefilled.inc(record.rows)
            self._queries.inc(record.lookups.queried)
            self._hits.inc(record.lookups.hits)
            return
        self._decode_steps.inc()
        self._verify.observe(record.verify_ms / 1e3)
        drafted = sum(commit.drafted for commit in commits)
        if drafted == 0:
            self._bypass_steps.inc()
            return
        self._draft.observe(record.draft_ms / 1e3)
        self._select.observe(record.select_ms / 1e3)
        self._drafts.inc(len(commits))
        self._drafted.inc(drafted)
        self._verified.inc(record.kept)
        self._pruned.inc(drafted - record.kept)
        self._accepted.inc(record.accepted)
        self._kept_rows.inc(record.rows)
        self._possible_rows.inc(record.possible)
        if record.ratio is not None:
            self._ratio_child(record.ratio).inc()
        self._count_positions([commit.accepted for commit in commits])

    def _count_positions(self, accepted: list[int]) -> None:
        for position in range(max(accepted)):
            self._accepted_at[position].inc(sum(count > position for count in accepted))

    def _ratio_child(self, ratio: float) -> Counter:
        if ratio not in self._ratios:
            self._ratios[ratio] = self._ratio.labels(f"{ratio:g}")
        return self._ratios[ratio]
