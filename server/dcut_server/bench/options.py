"""What a benchmark is asked for, checked before anything is loaded or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcut_trt.admission import blocks_needed, check_request, check_sampling
from dcut_trt.backends.base import Limits
from dcut_trt.errors import DcutError, InvalidRequest, UnsupportedOption
from dcut_trt.spec.policies import check_policy_name
from dcut_trt.types import Request, SamplingParams

DEFAULT_POLICIES = ("plain", "dflash", "ratio:0.25", "ratio:0.5", "ratio:0.75", "dcut", "auto")
DEFAULT_CONCURRENCY = (1, 4, 8, 16, 32)
LEAST_REQUESTS = 8  # a run this short still averages over a few prompts
_GOLDEN = (5**0.5 - 1) / 2


class InvalidBenchOption(DcutError):
    """An option of the benchmark is out of range. The message names option, value and limit."""

    def __init__(self, option: str, value: object, limit: str) -> None:
        super().__init__(f"{option} {value}: {limit}")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Raises InvalidBenchOption for a value that no engine could serve.

    policies: names, each served by every round.  concurrency: live requests of each closed loop.
    requests: prompts per round, None for three times the concurrency and at least 8.  rounds: slices of the dataset
    that every policy serves in turn.  max_tokens: output limit of a request.  range_ratio: 0 <= R < 1, limits are
    spread evenly over max_tokens * (1 - R) to max_tokens * (1 + R).  temperatures: each runs all of it, 0 is greedy.
    ignore_eos: every request then goes on to its limit.  warm_up: a short unmeasured run of each policy first.
    """

    policies: tuple[str, ...] = DEFAULT_POLICIES
    concurrency: tuple[int, ...] = DEFAULT_CONCURRENCY
    requests: int | None = None
    rounds: int = 3
    max_tokens: int = 128
    range_ratio: float = 0.0
    temperatures: tuple[float, ...] = (0.0,)
    ignore_eos: bool = False
    warm_up: bool = True

    def __post_init__(self) -> None:
        for name in self.policies:
            _check_policy(name)
        _check_list("--policies", self.policies)
        _check_list("--concurrency", self.concurrency)
        for option, least_of in (("--concurrency", min(self.concurrency)), ("--rounds", self.rounds)):
            _check_least(option, least_of)
        _check_least("--requests", self.requests)
        _check_least("--max-tokens", self.max_tokens)
        if not 0 <= self.range_ratio < 1:
            raise InvalidBenchOption("--range-ratio", self.range_ratio, "must be at least 0 and below 1")
        _check_list("--temperature", self.temperatures)
        for temperature in self.temperatures:
            _check_temperature(temperature)

    def requests_at(self, concurrency: int) -> int:
        """Prompts that every policy serves in one round."""
        return self.requests or max(LEAST_REQUESTS, 3 * concurrency)

    def max_tokens_of(self, place: int) -> int:
        """Of the request at this place of the dataset. Multiples of the golden ratio are spread evenly however many
        there are, so that every part of the dataset has long and short ones."""
        share = place * _GOLDEN % 1
        return max(1, round(self.max_tokens * (1 + self.range_ratio * (2 * share - 1))))

    @property
    def passes(self) -> int:
        """Runs of a closed loop in all, warm-up included."""
        pairs = len(self.temperatures) * len(self.concurrency)
        return pairs * len(self.policies) * (self.rounds + int(self.warm_up))


def check_batch(options: BenchOptions, max_batch: int) -> None:
    """Raise InvalidBenchOption for a concurrency that the bundle cannot hold in one step."""
    if max(options.concurrency) > max_batch:
        raise InvalidBenchOption("--concurrency", max(options.concurrency), f"the bundle's max_batch is {max_batch}")


def check_requests(options: BenchOptions, requests: Sequence[Request], limits: Limits) -> None:
    """Raise InvalidBenchOption unless these requests fit, each alone and as many together as shall be live."""
    for request in requests:
        try:
            check_request(request, limits)
        except InvalidRequest as error:
            raise InvalidBenchOption("--dataset", request.request_id, str(error)) from error
    live = max(options.concurrency)
    dearest = sorted((blocks_needed(request, limits) for request in requests), reverse=True)
    needed = sum(dearest[index % len(dearest)] for index in range(live))
    if needed > limits.num_blocks:
        raise InvalidBenchOption(
            "--concurrency",
            live,
            f"{live} of these requests may need {needed} KV blocks, there are {limits.num_blocks}; "
            "raise --kv-memory-mib or lower --max-tokens",
        )


def _check_list(option: str, values: Sequence[object]) -> None:
    shown = ",".join(str(value) for value in values)
    if not values:
        raise InvalidBenchOption(option, "(none)", "at least one value")
    if len(set(values)) != len(values):
        raise InvalidBenchOption(option, shown, "a value is there twice")


def _check_policy(name: str) -> None:
    try:
        check_policy_name(name)
    except UnsupportedOption as error:
        raise InvalidBenchOption("--policies", name, str(error)) from error


def _check_temperature(value: float) -> None:
    try:
        check_sampling(SamplingParams(temperature=value))
    except InvalidRequest as error:
        raise InvalidBenchOption("--temperature", value, "must be finite and at least 0") from error


def _check_least(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InvalidBenchOption(option, value, "must be at least 1")
