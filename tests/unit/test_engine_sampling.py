"""Sampled requests on the scripted engine: seeds decide, and pruning does not bend the distribution."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_runs import EOS, POLICIES, letters, run_all, run_alone

from dcut_trt.backends.scripted import Script, scripted_engine
from dcut_trt.types import Request, SamplingParams


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_at_any_ratio() -> None:
    script = Script(258, EOS, 1e9, seed=2)
    request = Request("r", letters("seeded"), 40, SamplingParams(1.0, seed=123))
    alone = run_alone(request, script)
    for policy in POLICIES:
        crowd = [Request(f"n{index}", letters("other"), 30, SamplingParams(1.0, seed=index)) for index in range(5)]
        streams = run_all(scripted_engine(policy, script=script), *crowd, request)
        assert streams["r"].tokens == alone.tokens


def test_without_a_seed_every_run_differs() -> None:
    unseeded = Request("r", letters("seeded"), 40, SamplingParams(1.0))
    script = Script(258, EOS, 1e9, seed=2)
    first, second = (run_alone(unseeded, script).tokens for _ in range(2))
    assert first != second


def small_script() -> Script:
    """Four tokens and a distribution that differs from state to state."""
    script = Script(258, EOS, 1e9, seed=4)
    script.logits[:, 4:] = -40.0
    script.argmax[:] = script.logits.argmax(axis=1)
    return script


@pytest.mark.parametrize("policy", ["plain", "dflash", "ratio:0.5"])
def test_sampled_tokens_follow_the_model_at_every_position_with_and_without_pruning(policy: str) -> None:
    script = small_script()
    runs = 2000
    engine = scripted_engine(policy, script=script, max_batch=8, max_len=32, draft_length=3, max_queue=runs)
    crowd = [Request(f"r{seed}", (0, 1), 3, SamplingParams(1.0, seed=seed)) for seed in range(runs)]
    streams = run_all(engine, *crowd)

    def share(prefix: list[int], token: int) -> float:
        weights = np.exp(script.logits[script.state(prefix)].astype(np.float64))
        return float(weights[token] / weights.sum())

    wanted = dict.fromkeys(np.ndindex(4, 4, 4), 0.0)
    for path in wanted:
        prefix = [0, 1]
        wanted[path] = float(runs)
        for token in path:
            wanted[path] *= share(prefix, token)
            prefix.append(token)
    seen = dict.fromkeys(wanted, 0)
    for stream in streams.values():
        seen[tuple(stream.tokens)] += 1
    # Rare paths are counted as one, so that every cell expects enough.
    common = [path for path, expectation in wanted.items() if expectation >= 10]
    cells = [(seen[path], wanted[path]) for path in common]
    cells.append((runs - sum(seen for seen, _ in cells), runs - sum(expectation for _, expectation in cells)))
    statistic = sum((found - expectation) ** 2 / expectation for found, expectation in cells)
    freedom = len(cells) - 1
    assert statistic < freedom + 3.1 * (2 * freedom) ** 0.5 + 5  # about one run in a thousand exceeds it
