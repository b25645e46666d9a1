"""Messages of trtllm.TrtllmService to the runtime's types and back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from smg_grpc_proto.generated import trtllm_service_pb2

from dcut_server.convert import MAX_STOP_TOKEN_IDS, check_streams, request_id_from_proto
from dcut_server.outbox import Parcel
from dcut_server.trtllm_fields import refuse_unserved
from dcut_trt.errors import InvalidRequest
from dcut_trt.types import FinishReason, Request, RequestTimes, SamplingParams, TokenLogprob, Usage

FINISH_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "cancelled"}
"""TensorRT-LLM's names; its "stop" covers end-of-sequence ids, stop ids and stop strings."""

TOP_K_OFF = (-1, 0)
FLOAT_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class Call:
    """One Generate call. keep_stop: leave the id that ended a stream in the output.  arrival: unix seconds, or None."""

    request: Request
    streams: int
    streaming: bool
    keep_stop: bool
    metrics: bool
    arrival: float | None


def call_from_proto(message: Any, deadline: float | None) -> Call:
    """deadline: seconds on the monotonic clock. Raises InvalidRequest, also for a set field that is not served."""
    refuse_unserved(message)
    if not message.max_tokens:
        raise InvalidRequest("max_tokens", 0, "is required and must be at least 1")
    if len(message.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stop_token_ids", f"{len(message.stop_token_ids)} ids", f"must be at most {MAX_STOP_TOKEN_IDS}"
        )
    sampling, output = message.sampling_config, message.output_config
    request = Request(
        request_id=request_id_from_proto(message.request_id),
        prompt_ids=tuple(message.tokenized.input_token_ids),
        max_tokens=message.max_tokens,
        sampling=sampling_from_proto(sampling),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        deadline=deadline,
        min_tokens=sampling.min_tokens,
        logprobs=output.logprobs if output.HasField("logprobs") else None,
    )
    return Call(
        request=request,
        streams=check_streams("sampling_config.num_return_sequences", sampling.num_return_sequences or 1),
        streaming=message.streaming,
        keep_stop=message.include_stop_token_in_output,
        metrics=output.return_perf_metrics,
        arrival=message.arrival_time if message.HasField("arrival_time") else None,
    )


def sampling_from_proto(message: Any) -> SamplingParams:
    """Unset fields keep our defaults, but for temperature: as in TensorRT-LLM it is 1 where top_k or top_p is set."""
    fields: dict[str, Any] = {
        name: _as_meant(getattr(message, name)) for name in FLOAT_FIELDS if message.HasField(name)
    }
    if message.HasField("top_k"):
        fields["top_k"] = 0 if message.top_k in TOP_K_OFF else message.top_k
    if message.HasField("seed"):
        fields["seed"] = message.seed
    if "temperature" not in fields and ("top_k" in fields or "top_p" in fields):
        fields["temperature"] = 1.0
    return SamplingParams(**fields)


def _as_meant(value: float) -> float:
    # The wire carries 32 bits: 0.9 arrives as 0.8999999761581421, and would sample other tokens than 0.9 does.
    return float(str(np.float32(value)))


@dataclass(slots=True)
class Output:
    """One stream of a call, as the caller is to see it: chunk() per parcel, then complete()."""

    call: Call
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    last: Parcel = field(default_factory=Parcel)

    def add(self, parcel: Parcel) -> Any:
        """Take a parcel; the chunk for it, None when it shows no token.

        The id that ended the stream, end-of-sequence or stop id, is left out with its logprob unless the call keeps
        it. completion_tokens counts it all the same: the engine generated it. The ids behind a stop string stay, for
        the string may begin and end inside a token.
        """
        self.last = parcel
        shown = len(parcel.tokens)
        if isinstance(parcel.matched, int) and not self.call.keep_stop:
            shown -= 1
        tokens = parcel.tokens[:shown]
        logprobs = [logprob_to_proto(entry) for entry in parcel.logprobs[:shown]]
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        if not tokens:
            return None
        return trtllm_service_pb2.GenerateStreamChunk(
            token_ids=tokens, sequence_index=self.index, logprobs=logprobs, **_counts(self._usage)
        )

    def complete(self) -> Any:
        """The last message of the stream, with all of its ids."""
        finish, matched, usage = self.last.finish, self.last.matched, self._usage
        assert finish is not None, "complete() follows the last parcel"
        message = trtllm_service_pb2.GenerateComplete(
            output_token_ids=self.tokens,
            sequence_index=self.index,
            finish_reason=FINISH_NAMES[finish],
            logprobs=self.logprobs,
            spec_accepted_tokens=usage.accepted,
            spec_draft_tokens=usage.verified,  # drafts that D-cut pruned never reached the target
            **_counts(usage),
        )
        if isinstance(matched, str):
            message.matched_stop_str = matched
        elif matched is not None:
            message.matched_token_id = matched
        if self.call.metrics and self.last.times is not None:
            message.perf_metrics.CopyFrom(metrics_to_proto(self.last.times, self.call.arrival))
        return message

    @property
    def _usage(self) -> Usage:
        assert self.last.usage is not None, "every event of the engine carries usage"
        return self.last.usage


def logprob_to_proto(entry: TokenLogprob) -> Any:
    top = [trtllm_service_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return trtllm_service_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top_logprobs=top)


def metrics_to_proto(times: RequestTimes, arrival: float | None) -> Any:
    """Unix seconds of what the engine noted on its monotonic clock; what did not happen stays 0."""
    offset = time.time() - time.monotonic()

    def unix(moment: float | None) -> float:
        return 0.0 if moment is None else moment + offset

    return trtllm_service_pb2.PerfMetrics(
        arrival_time=unix(times.submitted) if arrival is None else arrival,
        first_scheduled_time=unix(times.admitted),
        first_token_time=unix(times.first_token),
        last_token_time=unix(times.finished),
    )


def _counts(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
    }
