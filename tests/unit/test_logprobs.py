"""Log probabilities of raw logits, and the best tokens beside the chosen one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_trt.logprobs import token_logprob


@given(st.lists(st.integers(-40, 40), min_size=1, max_size=30), st.integers(0, 20), st.data())
def test_logprobs_equal_the_definition(quarters: list[int], top: int, data: st.DataObject) -> None:
    logits = np.array(quarters, np.float32) / 4  # coarse, so that ties happen
    chosen = data.draw(st.integers(0, len(logits) - 1))
    total = math.fsum(math.exp(logit) for logit in logits.tolist())
    wanted = [math.log(math.exp(logit) / total) for logit in logits.tolist()]
    found = token_logprob(logits, chosen, top)
    assert found.token_id == chosen
    assert found.logprob == pytest.approx(wanted[chosen])
    best = sorted(range(len(wanted)), key=lambda token: (-logits[token], token))[:top]
    assert [token for token, _ in found.top] == best
    assert [value for _, value in found.top] == pytest.approx([wanted[token] for token in best])


def test_logits_far_from_zero_neither_overflow_nor_vanish() -> None:
    found = token_logprob(np.array([1e4, 1e4 - 1, -np.inf], np.float32), 1, 3)
    assert found.logprob == pytest.approx(-1 - math.log1p(math.exp(-1)))
    assert found.top[2] == (2, -math.inf)
