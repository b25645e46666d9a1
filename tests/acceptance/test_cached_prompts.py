"""The prefix cache on the real model in fp32: neither tokens nor accepted drafts differ from a run without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from real_runs import chat_prompts
from test_lossless import TABLE

from dcut_trt.engine import Engine
from dcut_trt.spec.policies import make_policy
from dcut_trt.types import Request, StepEvent, Usage


def serve_in_turn(engine: Engine, requests: Sequence[Request], *, cached: bool) -> dict[str, tuple[list[int], Usage]]:
    """Tokens and usage of each request, two at a time; everything that was cached before is forgotten."""
    sharing = engine.scheduler.sharing
    sharing.clear()
    sharing.enabled = cached
    events: dict[str, list[StepEvent]] = {request.request_id: [] for request in requests}
    waiting = list(reversed(requests))
    while waiting or engine.has_work:
        if waiting and len(engine.scheduler.live_ids()) < 2:
            engine.submit(waiting.pop())
        for event in engine.step():
            assert event.error is None
            events[event.request_id].append(event)
        engine.scheduler.check_invariants()
    sharing.enabled = True
    return {
        name: ([token for event in seen for token in event.tokens], seen[-1].usage) for name, seen in events.items()
    }


@pytest.mark.timeout(120)
def test_real_streams_are_the_same_with_and_without_the_cache(smollm2_engine: Engine) -> None:
    engine = smollm2_engine
    engine.policy = make_policy("dcut", TABLE)
    prompts = [prompt for prompt in chat_prompts(engine, 12) if len(prompt) > 40][:2]
    # Every prompt twice, and once with a turn more.
    requests = [
        Request(f"{index}.{turn}", prompt + more, 16)
        for index, prompt in enumerate(prompts)
        for turn, more in enumerate(((), (), prompt[:20]))
    ]
    uncached = serve_in_turn(engine, requests, cached=False)
    cached = serve_in_turn(engine, requests, cached=True)
    for name, (tokens, usage) in cached.items():
        assert tokens == uncached[name][0]
        assert usage.output_tokens == uncached[name][1].output_tokens
    hits = [usage.cached_tokens for _, usage in cached.values()]
    assert sum(hit >= 32 for hit in hits) >= 2
    for request in requests[::3]:
        runs = []
        for enabled in (False, True):
            engine.scheduler.sharing.enabled = enabled
            runs.append(serve_alone(engine, request))
        (tokens, without), (tokens_again, usage) = runs
        assert tokens == tokens_again
        assert usage.cached_tokens >= 32 > without.cached_tokens == 0
        # The drafter's context is the same too: it guesses the same, and so the policy keeps the same.
        assert replace(usage, cached_tokens=0) == without


def serve_alone(engine: Engine, request: Request) -> tuple[list[int], Usage]:
    engine.submit(request)
    events = []
    while engine.has_work:
        events += engine.step()
    return [token for event in events for token in event.tokens], events[-1].usage
