"""S5, S10: output in fp32 does not depend on speculation, pruning or company: not one token differs from plain."""

from __future__ import annotations

import numpy as np
import pytest
from real_runs import chat_prompts, greedy, seeded, serve

from dcut_trt.engine import Engine
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.policies import make_policy
from dcut_trt.spec.policy import Policy
from dcut_trt.types import Request

POLICIES = ["plain", "dflash", "ratio:0.25", "ratio:0.5", "dcut", "auto"]
NUMBER, OUTPUT = 64, 64
# Not measured: costs so close together that the choice changes from step to step.
TABLE = CostTable(
    (1,), (0.25, 0.5, 0.75, 1.0), np.array([[10.0, 11.3, 11.4, 11.45]]), np.array([9.0]), "fixed", "never"
)

Outputs = dict[str, list[int]]


@pytest.fixture(scope="module")
def requests(smollm2_engine: Engine) -> list[Request]:
    return greedy(chat_prompts(smollm2_engine, NUMBER), OUTPUT)


@pytest.fixture(scope="module")
def alone(smollm2_engine: Engine, requests: list[Request]) -> Outputs:
    """Every request alone, without speculation."""
    return serve(smollm2_engine, make_policy("plain", None), requests, 1)


def policy_of(name: str, engine: Engine) -> Policy:
    return make_policy(name, TABLE, engine.limits.traits)


def differing(outputs: Outputs, alone: Outputs) -> list[str]:
    return [request_id for request_id, tokens in outputs.items() if tokens != alone[request_id]]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("width", "number"), [(8, NUMBER), (3, 16), (1, 4)])
def test_s5_no_token_differs_from_plain(
    smollm2_engine: Engine, requests: list[Request], alone: Outputs, name: str, width: int, number: int
) -> None:
    engine = smollm2_engine
    outputs = serve(engine, policy_of(name, engine), requests[:number], width)
    assert differing(outputs, alone) == []

    totals, records = engine.trace.totals, [record for record in engine.trace.records if record.kind == "decode"]
    assert max(record.batch for record in records) == width
    assert totals.output_tokens == sum(len(tokens) for tokens in outputs.values())
    assert (totals.accepted > 0) == (name != "plain")
    if name == "dcut" and width > 1:
        assert len({record.ratio for record in records}) >= 3


@pytest.mark.timeout(300)
def test_s10_a_seed_gives_the_same_tokens_alone_in_a_batch_and_at_any_ratio(
    smollm2_engine: Engine, requests: list[Request]
) -> None:
    sampled = seeded(requests[:8], 24, top_p=0.95)
    alone = serve(smollm2_engine, make_policy("plain", None), sampled, 1)
    for name in ("dflash", "ratio:0.25", "auto"):
        assert differing(serve(smollm2_engine, policy_of(name, smollm2_engine), sampled, 8), alone) == []
