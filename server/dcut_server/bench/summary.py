"""From passes to the numbers of a (temperature, concurrency, policy) cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, geometric_mean, median

import numpy as np

from dcut_server.bench.confidence import Confidence, confidence_of
from dcut_server.bench.runner import Pass, Stream
from dcut_trt.metrics import StepRecord

PLAIN = "plain"
DFLASH = "dflash"


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Means over the decoding steps, in milliseconds. The stages and the rest add up to the step; host is the part of
    the step, whatever the stage, in which no network ran."""

    step: float
    draft: float
    select: float
    verify: float
    rest: float
    host: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Output compared with plain decoding, place by place. Two outputs part once, so tokens counts from there on."""

    tokens: int
    compared: int
    requests: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one temperature and concurrency, over all rounds.

    tokens_per_s: output tokens per second of wall time, prefill included, while `concurrency` were live
    (Pass.measured); *_rounds holds one value per round, spread is (largest - smallest) / median of them.
    output_tokens, wall_s: of everything.  speedup: over plain, None without it.
    tau: tokens per request and decoding step, bonus token included.  keep_ratio: rows verified of all B * (D + 1).
    mean_batch: requests in a decoding step.  full_batch_tokens_per_s: in decoding steps with every request live.
    acceptance: [D] share of blocks whose first k drafts were all accepted, k = 1..D; of blocks that ended with their
    request before their first rejection nothing is counted. None unless every step verified every draft.
    prefill_share: of the wall time.  ratio_steps: decoding steps by the ratio that was chosen, in hundredths.
    ttft: from submission to the first token.  inter_token: time since the message before, shared by its tokens.
    difference: None when plain was not measured, or when outputs are sampled.  confidence: None without drafts.
    """

    temperature: float
    concurrency: int
    policy: str
    requests: int
    output_tokens: int
    wall_s: float
    tokens_per_s: float
    tokens_per_s_rounds: tuple[float, ...]
    spread: float
    speedup: float | None
    speedup_rounds: tuple[float, ...]
    of_best: float
    tau: float
    keep_ratio: float
    acceptance: tuple[float, ...] | None
    mean_batch: float
    full_batch_tokens_per_s: float | None
    steps: int
    prefill_share: float
    ratio_steps: dict[str, int]
    step_ms: StepTimes
    ttft_ms: Percentiles
    inter_token_ms: Percentiles
    difference: Difference | None
    confidence: Confidence | None


@dataclass(frozen=True, slots=True)
class PolicyMean:
    """Geometric means of one policy's throughput over all its cells, relative to others in the same cell.

    over_plain, over_dflash: None unless that policy was measured in every one of these cells.
    """

    policy: str
    cells: int
    over_plain: float | None
    over_dflash: float | None
    of_best: float


def summarise(passes: Sequence[Pass]) -> list[Cell]:
    """One cell per temperature, concurrency and policy, in the order in which each was first served."""
    groups: dict[tuple[float, int], dict[str, list[Pass]]] = {}
    for served in passes:
        group = groups.setdefault((served.temperature, served.concurrency), {})
        group.setdefault(served.policy, []).append(served)
    return [cell for group in groups.values() for cell in _cells(group)]


def policy_means(cells: Sequence[Cell]) -> list[PolicyMean]:
    """In the order of the cells."""
    rates = {(cell.temperature, cell.concurrency, cell.policy): cell.tokens_per_s for cell in cells}

    def over(own: Sequence[Cell], other: str) -> float | None:
        pairs = [(cell.tokens_per_s, rates.get((cell.temperature, cell.concurrency, other))) for cell in own]
        ratios = [rate / base for rate, base in pairs if base is not None]
        return geometric_mean(ratios) if len(ratios) == len(own) else None

    means = []
    for policy in dict.fromkeys(cell.policy for cell in cells):
        own = [cell for cell in cells if cell.policy == policy]
        of_best = geometric_mean([cell.of_best for cell in own])
        means.append(PolicyMean(policy, len(own), over(own, PLAIN), over(own, DFLASH), of_best))
    return means


def _cells(group: dict[str, list[Pass]]) -> list[Cell]:
    """The policies of one temperature and concurrency."""
    by_round = {policy: sorted(passes, key=lambda served: served.round) for policy, passes in group.items()}
    best = max(_total_rate(passes) for passes in by_round.values())
    return [_cell(passes, by_round.get(PLAIN), best) for passes in by_round.values()]


def _cell(passes: list[Pass], plain: list[Pass] | None, best: float) -> Cell:
    records = [record for served in passes for record in served.records]
    decode = [record for record in records if record.kind == "decode"]
    streams = [stream for served in passes for stream in served.streams]
    rates = tuple(served.tokens_per_s for served in passes)
    output_tokens, wall_s = sum(served.output_tokens for served in passes), sum(served.wall_s for served in passes)
    full = [record for record in decode if record.batch == passes[0].concurrency]
    full_ms = sum(record.step_ms for record in full)
    rows = sum(record.batch for record in decode)
    speedups = () if plain is None else tuple(rate / base.tokens_per_s for rate, base in zip(rates, plain, strict=True))
    return Cell(
        temperature=passes[0].temperature,
        concurrency=passes[0].concurrency,
        policy=passes[0].policy,
        requests=len(streams),
        output_tokens=output_tokens,
        wall_s=wall_s,
        tokens_per_s=_total_rate(passes),
        tokens_per_s_rounds=rates,
        spread=(max(rates) - min(rates)) / median(rates),
        speedup=None if plain is None else _total_rate(passes) / _total_rate(plain),
        speedup_rounds=speedups,
        of_best=_total_rate(passes) / best,
        tau=_ratio(sum(record.emitted for record in decode), rows),
        keep_ratio=_ratio(sum(record.rows for record in decode), sum(record.possible for record in decode)),
        acceptance=acceptance_by_depth(decode),
        mean_batch=_ratio(rows, len(decode)),
        full_batch_tokens_per_s=sum(record.emitted for record in full) / full_ms * 1e3 if full else None,
        steps=len(decode),
        prefill_share=sum(record.step_ms for record in records if record.kind == "prefill") / 1e3 / wall_s,
        ratio_steps=_ratio_steps(decode),
        step_ms=_step_times(decode),
        ttft_ms=_percentiles([(s.arrivals[0][0] - s.submitted) * 1e3 for s in streams if s.arrivals]),
        inter_token_ms=_percentiles([gap for stream in streams for gap in token_gaps_ms(stream)]),
        difference=None if plain is None or passes[0].temperature > 0 else _difference(passes, plain),
        confidence=confidence_of([blocks for served in passes for blocks in served.watched]),
    )


def acceptance_by_depth(decode: Sequence[StepRecord]) -> tuple[float, ...] | None:
    """Cell.acceptance of these decoding steps."""
    blocks = [accepted for record in decode for accepted in record.accepted_each]
    if not blocks or any(record.rows < record.possible for record in decode):
        return None
    draft_length = decode[0].possible // decode[0].batch - 1
    return tuple(fmean(accepted >= depth for accepted in blocks) for depth in range(1, draft_length + 1))


def _ratio_steps(decode: Sequence[StepRecord]) -> dict[str, int]:
    counts = Counter("none" if record.ratio is None else f"{round(record.ratio, 2):g}" for record in decode)
    return dict(sorted(counts.items()))


def token_gaps_ms(stream: Stream) -> list[float]:
    """One value per token after the first message: the wait for its message, shared by the tokens in it."""
    gaps: list[float] = []
    for (before, _), (now, tokens) in pairwise(stream.arrivals):
        gaps.extend([(now - before) * 1e3 / tokens] * tokens)
    return gaps


def _step_times(decode: list[StepRecord]) -> StepTimes:
    if not decode:  # every request ended with its first token
        return StepTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    step, draft, select, verify, host = (
        fmean(getattr(record, name) for record in decode)
        for name in ("step_ms", "draft_ms", "select_ms", "verify_ms", "host_ms")
    )
    return StepTimes(step, draft, select, verify, rest=step - draft - select - verify, host=host)


def _difference(passes: list[Pass], plain: list[Pass]) -> Difference:
    pairs = [
        (stream.tokens, base.tokens)
        for served, reference in zip(passes, plain, strict=True)
        for stream, base in zip(served.streams, reference.streams, strict=True)
    ]
    return Difference(
        tokens=sum(differing_tokens(tokens, base) for tokens, base in pairs),
        compared=sum(max(len(tokens), len(base)) for tokens, base in pairs),
        requests=sum(tokens != base for tokens, base in pairs),
    )


def differing_tokens(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """Places that hold different tokens, or a token in one of the two only."""
    same = sum(one == other for one, other in zip(tokens, reference, strict=False))
    return max(len(tokens), len(reference)) - same


def _total_rate(passes: list[Pass]) -> float:
    measured = [served.measured for served in passes]
    return sum(tokens for tokens, _ in measured) / sum(seconds for _, seconds in measured)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _percentiles(values: list[float]) -> Percentiles:
    if not values:
        return Percentiles(0.0, 0.0)
    p50, p95 = np.percentile(values, [50, 95]).tolist()
    return Percentiles(p50, p95)
