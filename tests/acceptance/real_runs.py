"""Prompts of the shipped manifests, and closed loops over a real engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from dcut_server.bench.datasets import SHIPPED, load_dataset
from dcut_trt.engine import Engine
from dcut_trt.spec.policy import Policy
from dcut_trt.types import Request, SamplingParams

LONGEST_PROMPT = 100


def chat_prompts(engine: Engine, number: int) -> list[tuple[int, ...]]:
    """Ids of a random sample of the shipped prompts that are not long, as a user's messages."""
    tokenizer = engine.tokenizer
    texts = [prompt.text for name in SHIPPED for prompt in load_dataset(name).prompts]
    chats = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]
    ids = [tuple(tokenizer.encode(chat, add_special_tokens=False)) for chat in chats]
    return random.Random(0).sample([prompt for prompt in ids if len(prompt) <= LONGEST_PROMPT], number)


def greedy(prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[Request]:
    return [Request(f"r{index}", prompt, max_tokens) for index, prompt in enumerate(prompts)]


def seeded(requests: Sequence[Request], max_tokens: int, top_p: float) -> list[Request]:
    """The same requests, sampled at temperature 1, each with a seed of its own."""
    return [
        replace(request, max_tokens=max_tokens, sampling=SamplingParams(1.0, top_p=top_p, seed=1000 + index))
        for index, request in enumerate(requests)
    ]


def serve(engine: Engine, policy: Policy, requests: Sequence[Request], width: int) -> dict[str, list[int]]:
    """Tokens of every request; one joins per step while fewer than `width` are live, so nobody starts or ends together.

    The engine must be idle.
    """
    engine.policy = policy
    engine.trace.reset()
    waiting = list(reversed(requests))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while waiting or engine.has_work:
        if waiting and len(engine.scheduler.live_ids()) < width:
            engine.submit(waiting.pop())
        for event in engine.step():
            assert event.error is None
            tokens[event.request_id].extend(event.tokens)
    engine.scheduler.check_invariants()
    return tokens
