"""Sampling: keyed draws, the distribution that the parameters describe, and rows that are no distribution."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dcut_trt.errors import StepFailed
from dcut_trt.sampling import sample_token, uniform
from dcut_trt.types import FloatArray, SamplingParams

SEED = 20_260_714
NEAR = 1e-5  # weights are float32


def chi_square(observed: list[int], expected: list[float]) -> float:
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in zip(observed, expected, strict=True))


def chi_square_limit(freedom: int) -> float:
    """The value that one draw in a thousand exceeds (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3)


def candidates(logits: FloatArray, params: SamplingParams) -> list[tuple[int, float]]:
    """Ids that may be drawn and their probabilities, best first: the definition, in float64, without a shortcut."""
    scaled = [float(logit) / params.temperature for logit in logits]
    peak = max(scaled)
    ranked = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    ranked = ranked[: params.top_k or len(ranked)]
    ranked = [token for token in ranked if math.exp(scaled[token] - peak) >= params.min_p]
    weights = [math.exp(scaled[token] - peak) for token in ranked]
    kept, mass = 0, 0.0
    while kept < len(ranked) and mass < params.top_p * sum(weights):
        mass += weights[kept]
        kept += 1
    return [(token, weight / mass) for token, weight in zip(ranked[:kept], weights, strict=False)]


def test_a_draw_depends_on_seed_position_and_purpose_alone() -> None:
    assert uniform(SEED, 7) == uniform(SEED, 7)
    draws = {uniform(*key) for key in itertools.product((0, 1, 2**63 - 1), (0, 1), (0, 1))}
    assert len(draws) == 12


def test_draws_are_uniform_over_positions_and_over_seeds() -> None:
    for draws in ([uniform(SEED, index) for index in range(20_000)], [uniform(index, 5) for index in range(20_000)]):
        assert 0 <= min(draws) < max(draws) < 1
        cells = np.bincount((np.array(draws) * 50).astype(int), minlength=50)
        assert chi_square(cells.tolist(), [400.0] * 50) < chi_square_limit(49)


def test_neighbouring_positions_are_independent() -> None:
    draws = np.array([uniform(SEED, index) for index in range(20_001)])
    pairs = (draws[:-1] * 7).astype(int) * 7 + (draws[1:] * 7).astype(int)
    assert chi_square(np.bincount(pairs, minlength=49).tolist(), [20_000 / 49] * 49) < chi_square_limit(48)


@given(
    st.lists(st.integers(-12, 12), min_size=1, max_size=12),
    st.floats(0.1, 3),
    st.integers(0, 14),
    st.sampled_from([1.0, 0.95, 0.8, 0.5, 0.1, 1e-6]),
    st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]),
    st.integers(0, 1000),
)
def test_the_drawn_id_is_where_the_draw_falls(
    quarters: list[int], temperature: float, top_k: int, top_p: float, min_p: float, position: int
) -> None:
    logits = np.array(quarters, np.float32) / 4  # coarse, so that ties at the edges of top-k happen
    params = SamplingParams(temperature, top_k, top_p, min_p=min_p)
    allowed = candidates(logits, params)
    # Where rounding alone decides how many ids make up top_p or pass min_p, the definition has no answer.
    assume(len(candidates(logits, replace(params, top_p=top_p * (1 - NEAR)))) == len(allowed))
    for share in (1 - NEAR, 1 + NEAR) if min_p < 1 else (1 - NEAR,):
        assume(candidates(logits, replace(params, min_p=min_p * share)) == allowed)
    if top_k == 0 and top_p == 1.0 and min_p == 0.0:
        allowed.sort()  # ids in their own order
    token = sample_token(logits, params, SEED, position)
    place = [each for each, _ in allowed].index(token)
    below = sum(share for _, share in allowed[:place])
    assert below - NEAR <= uniform(SEED, position) <= below + allowed[place][1] + NEAR


@pytest.mark.parametrize(
    "params",
    [SamplingParams(1.0), SamplingParams(0.7), SamplingParams(1.3, top_k=3), SamplingParams(1.0, top_p=0.8)],
)
def test_a_hundred_thousand_draws_follow_the_distribution(params: SamplingParams) -> None:
    draws = 100_000 if params == SamplingParams(1.0) else 20_000
    logits = np.array([0.5, -1.0, 2.0, 1.0, -0.5], np.float32)
    counts = Counter(sample_token(logits, params, SEED, position) for position in range(draws))
    allowed = candidates(logits, params)
    assert set(counts) == {token for token, _ in allowed}
    observed = [counts[token] for token, _ in allowed]
    assert chi_square(observed, [share * draws for _, share in allowed]) < chi_square_limit(len(allowed) - 1)


def test_a_large_vocabulary_is_drawn_as_one_sum_would_draw_it() -> None:
    rng = np.random.default_rng(SEED)
    logits = rng.normal(0, 3, 5000).astype(np.float32)
    mass: NDArray[np.float64] = np.cumsum(np.exp(logits - logits.max(), dtype=np.float64))
    for position in range(500):
        token = sample_token(logits, SamplingParams(1.0), SEED, position)
        assert abs(int(np.searchsorted(mass, uniform(SEED, position) * mass[-1], side="right")) - token) <= 1


def test_an_id_without_mass_is_never_drawn() -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[[3, 255, 256, 999]] = 0.0
    drawn = {sample_token(logits, SamplingParams(1.0), SEED, position) for position in range(200)}
    assert drawn == {3, 255, 256, 999}


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(1.0, top_k=900, top_p=0.999)])
def test_the_most_extreme_draws_hit_an_id_that_has_mass(
    monkeypatch: pytest.MonkeyPatch, draw: float, params: SamplingParams
) -> None:
    monkeypatch.setattr("dcut_trt.sampling.uniform", lambda *_: draw)
    logits = np.full(1000, -np.inf, np.float32)
    logits[[300, 301, 700]] = 0.1
    assert sample_token(logits, params, SEED, 0) == {0.0: 300, 0.5: 301}.get(draw, 700)


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1e-30, 1e-300])
def test_greedy_and_nearly_greedy_take_the_lowest_id_of_a_tie_or_stay_within_it(temperature: float) -> None:
    logits = np.array([1.0, 5.0, 2.0, 5.0, 4.9], np.float32)
    drawn = {sample_token(logits, SamplingParams(temperature), SEED, position) for position in range(50)}
    assert drawn == ({1} if temperature == 0 else {1, 3})


def test_a_huge_temperature_is_uniform() -> None:
    logits = np.array([0.0, 50.0, -50.0], np.float32)
    counts = Counter(sample_token(logits, SamplingParams(1e300), SEED, position) for position in range(3000))
    assert chi_square([counts[token] for token in range(3)], [1000.0] * 3) < chi_square_limit(2)


@pytest.mark.parametrize("params", [SamplingParams(0.0), SamplingParams(1.0), SamplingParams(1.0, top_k=2, top_p=0.5)])
@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [-math.inf] * 3, [0.0, math.inf, 1.0]])
def test_a_row_that_is_no_distribution_fails_with_its_position(params: SamplingParams, row: list[float]) -> None:
    with pytest.raises(StepFailed, match="position 17"):
        sample_token(np.array(row, np.float32), params, SEED, 17)
