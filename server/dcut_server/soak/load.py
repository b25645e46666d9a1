"""Random requests of every kind, and what each may end with."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from dcut_server.client import CallFailed, DcutClient
from dcut_trt.types import FinishReason

TEXTS = (
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "List three prime numbers and explain why they are prime.",
    "Übersetze: Der Hund schläft. 日本語も書けますか 🙂",
    "def fibonacci(n):",
)
LONGEST_PROMPT = 400  # token ids
INVALID: tuple[dict[str, Any], ...] = (
    {"temperature": -1.0},
    {"top_p": 0.0},
    {"max_tokens": 0},
    {"stop": [""]},
    {"stop_token_ids": [-1]},
    {"repetition_penalty": 0.0},
    {"logprobs": 21},
    {"n": 0},
)
REFUSED_PAUSE_S = 0.05  # a client that is refused tries again a little later
_NOT_NOW = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED})
_CAUSED = {"deadline": grpc.StatusCode.DEADLINE_EXCEEDED, "invalid": grpc.StatusCode.INVALID_ARGUMENT}


@dataclass(slots=True)
class Tally:
    """What became of the requests so far. lost: those that ended in a way their kind does not allow, in words."""

    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0
    lost: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Knobs:
    """vocab_size: token ids to draw from.  repeatable: whether the same greedy prompt must always give the same answer
    (fp32; half precision rounds near-ties by the shape of the batch)."""

    vocab_size: int
    repeatable: bool


async def one_request(client: DcutClient, knobs: Knobs, random_: random.Random, tally: Tally) -> None:
    """Send one request of a random kind, and count how it ended."""
    kind = random_.choices(
        ("normal", "known", "cancel", "abort", "deadline", "slow", "invalid"), (50, 10, 12, 8, 6, 6, 8)
    )[0]
    tally.kinds[kind] += 1
    try:
        outcome = await _KINDS[kind](client, knobs, random_, tally)
    except CallFailed as error:
        outcome = error.code.name
        if error.code not in _NOT_NOW and error.code is not _CAUSED.get(kind):
            tally.lost.append(f"{kind}: {error}")
        await asyncio.sleep(REFUSED_PAUSE_S)
    tally.outcomes[outcome] += 1


async def _normal(client: DcutClient, knobs: Knobs, random_: random.Random, tally: Tally) -> str:
    return await _read(client, _prompt(knobs, random_), _options(knobs, random_), tally)


async def _known(client: DcutClient, knobs: Knobs, random_: random.Random, tally: Tally) -> str:
    """A greedy prompt that was answered before, in whatever batch: the answer must be the same."""
    text = random_.choice(TEXTS)
    answer = await client.complete(text, max_tokens=24)
    first = tally.answers.setdefault(text, answer.token_ids)
    if knobs.repeatable and first != answer.token_ids:
        tally.changed.append(text)
    tally.output_tokens += len(answer.token_ids)
    return answer.finish.value


async def _cancel(client: DcutClient, knobs: Knobs, random_: random.Random, tally: Tally) -> str:
    """Hang up after a few messages, or before the first."""
    reading = asyncio.create_task(
        _read(client, _prompt(knobs, random_), {"max_tokens": 200, "ignore_eos": True}, tally)
    )
    await asyncio.wait({reading}, timeout=random_.random() * 0.3)
    if reading.done():
        return reading.result()
    reading.cancel()
    await asyncio.wait({reading})
    return "hung up"


async def _abort(client: DcutClient, knobs: Knobs, random_: random.Random, tally: Tally) -> str:
    request_id = f"abort-{random_.getrandbits(64):x}"
    options = {"max_tokens": 200, "ignore_eos": True, "request_id": request_id}
    reading = asyncio.create_task(_read(client, _prompt(knobs, random_), options, tally))
    await asyncio.wait({reading}, timeout=random_.random() * 0.3)
    await client.abort(request_id)
    return await reading


async def _deadline(client: DcutClient, knobs: Knobs, random_: random.Random, tally: Tally) -> str:
    options = {"max_tokens": 400, "ignore_eos": True}
    return await _read(client, _prompt(knobs, random_), options, tally, timeout_s=0.05 + random_.random() * 0.3)


async def _slow(client: DcutClient, knobs: Knobs, random_: random.Random, tally: Tally) -> str:
    return await _read(client, _prompt(knobs, random_), {"max_tokens": 60}, tally, pause_s=random_.random() * 0.2)


async def _invalid(client: DcutClient, knobs: Knobs, random_: random.Random, tally: Tally) -> str:
    outcome = await _read(client, _prompt(knobs, random_), random_.choice(INVALID), tally)
    tally.lost.append("invalid: it was served")
    return outcome


_KINDS: dict[str, Callable[..., Any]] = {
    "normal": _normal,
    "known": _known,
    "cancel": _cancel,
    "abort": _abort,
    "deadline": _deadline,
    "slow": _slow,
    "invalid": _invalid,
}


async def _read(
    client: DcutClient,
    prompt: Any,
    options: dict[str, Any],
    tally: Tally,
    timeout_s: float | None = None,
    pause_s: float = 0.0,
) -> str:
    finish: FinishReason | None = None
    async for chunk in client.generate(prompt, timeout_s, **options):
        tally.output_tokens += len(chunk.token_ids)
        finish = chunk.finish or finish
        if pause_s:
            await asyncio.sleep(pause_s)
    if finish is None:
        tally.lost.append("a stream ended without its last message")
        return "cut"
    return finish.value


def _prompt(knobs: Knobs, random_: random.Random) -> Any:
    text = random_.choice(TEXTS)
    match random_.randrange(4):
        case 0:
            return [{"role": "user", "content": text}]
        case 1:
            return [random_.randrange(knobs.vocab_size) for _ in range(random_.randint(1, LONGEST_PROMPT))]
        case _:
            return text * random_.randint(1, 6)


def _options(knobs: Knobs, random_: random.Random) -> dict[str, Any]:
    """Every option is set now and then, alone and together with others."""
    offered: dict[str, Any] = {
        "temperature": random_.choice((0.0, 0.3, 1.0, 2.0)),
        "top_k": random_.choice((0, 1, 40)),
        "top_p": random_.choice((0.5, 0.95, 1.0)),
        "min_p": random_.choice((0.0, 0.05)),
        "seed": random_.getrandbits(32),
        "repetition_penalty": random_.choice((0.9, 1.2)),
        "presence_penalty": random_.choice((-0.5, 0.5)),
        "frequency_penalty": random_.choice((-0.5, 0.5)),
        "logit_bias": {random_.randrange(knobs.vocab_size): random_.choice((-100.0, 5.0))},
        "stop": random_.sample(("the", ".", "\n", "e t", "zzzz"), random_.randint(1, 3)),
        "stop_token_ids": [random_.randrange(knobs.vocab_size)],
        "ignore_eos": True,
        "min_tokens": 1,
        "logprobs": random_.choice((0, 3)),
        "n": random_.choice((1, 2, 3)),
        "priority": random_.randint(-5, 5),
        "skip_special_tokens": False,
    }
    chosen = {name: value for name, value in offered.items() if random_.random() < 0.25}
    return {**chosen, "max_tokens": random_.choice((1, 8, 32, 100))}


async def load_for(
    client: DcutClient, concurrency: int, seconds: float, knobs: Knobs, random_: random.Random, tally: Tally
) -> None:
    """Keep this many requests live for a while, then let them end."""
    end = time.monotonic() + seconds

    async def reader() -> None:
        while time.monotonic() < end:
            await one_request(client, knobs, random_, tally)

    async with asyncio.TaskGroup() as readers:
        for _ in range(concurrency):
            readers.create_task(reader())
