"""Closed loops on one engine: the policies take turns on the same prompts, so that a noisy moment hits all alike."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dcut_server.bench.datasets import Prompt
from dcut_server.bench.options import BenchOptions
from dcut_server.bench.watcher import Watched, Watcher
from dcut_trt.engine import Engine
from dcut_trt.metrics import StepRecord
from dcut_trt.spec.policies import make_policy
from dcut_trt.tokenizer import Tokenizer
from dcut_trt.types import Request, SamplingParams, StepEvent

WARM_UP = -1  # the round before the first
LOADED_FROM = 2  # times the concurrency in requests

Progress = Callable[[int, int, str], None]
"""Takes passes done, passes in all, and what runs now."""


@dataclass(slots=True)
class Stream:
    """What a reader of one request would have seen. arrivals: (clock in seconds, tokens) of every message."""

    submitted: float
    tokens: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def take(self, event: StepEvent, now: float) -> None:
        if event.tokens:
            self.tokens.extend(event.tokens)
            self.arrivals.append((now, len(event.tokens)))


@dataclass(frozen=True, slots=True)
class Pass:
    """One policy serving one slice of prompts. streams: by request, in the order of the slice.

    watched: its drafting steps, when somebody watched.  loaded: tokens, and seconds, until fewer than `concurrency`
    were live because none waited any more; of a server under load, what comes after is no part.
    """

    policy: str
    concurrency: int
    round: int
    wall_s: float
    records: tuple[StepRecord, ...]
    streams: tuple[Stream, ...]
    temperature: float = 0.0
    watched: tuple[Watched, ...] = ()
    loaded: tuple[int, float] | None = None

    @property
    def measured(self) -> tuple[int, float]:
        """Tokens and seconds that count: those under load, or all where too few requests make that a short time."""
        long = len(self.streams) >= LOADED_FROM * self.concurrency
        return self.loaded if self.loaded is not None and long else (self.output_tokens, self.wall_s)

    @property
    def output_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self.streams)

    @property
    def tokens_per_s(self) -> float:
        tokens, seconds = self.measured
        return tokens / seconds


def chat_requests(prompts: Sequence[Prompt], tokenizer: Tokenizer, options: BenchOptions) -> list[Request]:
    """One request per prompt, as a user's message, greedy. Its seed is its place, so that every policy draws alike."""
    texts = [tokenizer.render_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    return [
        Request(
            request_id=prompt.id,
            prompt_ids=tuple(tokenizer.encode(text, add_special_tokens=False)),
            max_tokens=options.max_tokens_of(seed),
            sampling=SamplingParams(seed=seed),
            ignore_eos=options.ignore_eos,
        )
        for seed, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]


def measure(
    engine: Engine,
    requests: Sequence[Request],
    options: BenchOptions,
    progress: Progress = lambda done, total, what: None,
) -> list[Pass]:
    """Every pass of every concurrency, in the order they ran. The engine must be idle; it is idle after."""
    served = engine.policy
    # Policies that learn live as long as an engine does, as in a server that has run for a while.
    limits = engine.limits
    watchers = {
        name: Watcher(make_policy(name, engine.cost_table, limits.traits), limits.draft_length)
        for name in options.policies
    }
    passes: list[Pass] = []
    try:
        for done, turn in enumerate(schedule(options)):
            progress(done, options.passes, turn.shown(options))
            part = round_slice(requests, options.requests_at(turn.concurrency), max(turn.round, 0))
            part = [_at_temperature(request, turn.temperature) for request in part]
            engine.policy = watcher = watchers[turn.policy]
            if turn.round == WARM_UP:
                # The runtime meets the shapes of this policy and batch size, and a policy that learns this traffic.
                serve(engine, part[: turn.concurrency], turn.concurrency, turn.policy)
                watcher.take()
            else:
                ended = serve(engine, part, turn.concurrency, turn.policy, turn.round)
                passes.append(replace(ended, temperature=turn.temperature, watched=watcher.take()))
        progress(options.passes, options.passes, "done")
    finally:
        if not engine.has_work:
            engine.policy = served
    return passes


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass that is to run. round: WARM_UP before those that count."""

    temperature: float
    concurrency: int
    round: int
    policy: str

    def shown(self, options: BenchOptions) -> str:
        sampled = f"temperature {self.temperature:g}, " if len(options.temperatures) > 1 else ""
        return f"{sampled}concurrency {self.concurrency}, {self.policy}"


def schedule(options: BenchOptions) -> Iterator[Turn]:
    """Every pass of a benchmark, in the order in which they run."""
    for temperature in options.temperatures:
        for concurrency in options.concurrency:
            for round_number in range(WARM_UP if options.warm_up else 0, options.rounds):
                for name in turns(options.policies, max(round_number, 0), options.rounds):
                    yield Turn(temperature, concurrency, round_number, name)


def turns(policies: Sequence[str], round_number: int, rounds: int) -> list[str]:
    """The order of the policies in a round: rotated, so that over all rounds each comes early as often as late."""
    stride = max(1, len(policies) // rounds)
    first = round_number * stride % len(policies)
    return [*policies[first:], *policies[:first]]


def round_slice(requests: Sequence[Request], size: int, round_number: int) -> list[Request]:
    """The prompts of a round: the next `size` of the dataset, from its start again where it ends."""
    first = round_number * size
    chosen = [requests[index % len(requests)] for index in range(first, first + size)]
    # A slice longer than the dataset repeats prompts, and live requests must not share an id.
    return [replace(request, request_id=f"{place}:{request.request_id}") for place, request in enumerate(chosen)]


def serve(engine: Engine, requests: Sequence[Request], concurrency: int, policy: str, round_number: int = 0) -> Pass:
    """Serve all requests with at most `concurrency` live: a new one is submitted when one ends.

    policy: what the pass is called.  Raises the error that a request ends with.
    """
    clock = time.perf_counter
    waiting = deque(requests)
    streams: dict[str, Stream] = {}
    records: list[StepRecord] = []
    live = 0
    loaded: tuple[int, float] | None = None
    engine.trace.records.clear()
    begun = clock()
    while waiting or live:
        while waiting and live < concurrency:
            request = waiting.popleft()
            streams[request.request_id] = Stream(clock())
            engine.submit(request)
            live += 1
        events = engine.step()
        now = clock()
        # The trace keeps the latest records only.
        records.extend(engine.trace.records)
        engine.trace.records.clear()
        for event in events:
            if event.error is not None:
                raise event.error
            streams[event.request_id].take(event, now)
            live -= event.final
        if loaded is None and live < concurrency and not waiting:
            loaded = sum(len(stream.tokens) for stream in streams.values()), now - begun
    wall_s = clock() - begun
    return Pass(policy, concurrency, round_number, wall_s, tuple(records), tuple(streams.values()), loaded=loaded)


def _at_temperature(request: Request, temperature: float) -> Request:
    return replace(request, sampling=replace(request.sampling, temperature=temperature))
