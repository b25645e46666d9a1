"""S6: sampled output has the target's distribution, whatever is drafted and pruned."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from rejection import (
    Keep,
    Model,
    Probs,
    distribution,
    drawn,
    keep_by_argmax,
    keep_by_budget,
    largest,
    shifted,
    tables,
    total_variation,
)

from dcut_trt.backends.scripted import Script, scripted_engine
from dcut_trt.spec.accept import accept
from dcut_trt.types import Request, SamplingParams

VOCAB, DEPTH, LENGTH = 3, 2, 3
COSTS = (2.0, 2.6, 4.0)  # of the three ratios: the scores decide which one pays
EDGE_COSTS = (2.0, 9.0, 4.3)  # all or nothing, on the edge: a confident first draft has everything verified
EXACT, SEEDS = 1e-12, range(5)
TRIALS = 100_000


def drafter(seed: int) -> Probs:
    """[D, V]: one distribution per depth, as a block drafter has before anything is drawn."""
    return np.random.default_rng(100 + seed).dirichlet(np.full(VOCAB, 0.8), size=DEPTH)


def target_only(target: Model, q: Probs, keep: Callable[[], int]) -> dict[tuple[int, ...], float]:
    """Texts and their probabilities under our rule: drafts are greedy, and every emitted token is the target's own
    choice, which is followed here for every token that it could be."""
    greedy = [int(row.argmax()) for row in q]
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    while any(len(text) < LENGTH for text in texts):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in texts.items():
            if len(text) == LENGTH:
                longer[text] = longer.get(text, 0.0) + probability
                continue
            kept = greedy[: keep()]
            # accept() stops asking at the first mismatch, so two choices may emit the same text: each is counted once.
            ways: dict[tuple[int, ...], float] = {}
            for choices in itertools.product(range(VOCAB), repeat=len(kept) + 1):
                emitted = tuple(accept(kept, lambda depth, choices=choices: choices[depth]))
                ways[emitted] = float(
                    np.prod([target(text + emitted[:place])[token] for place, token in enumerate(emitted)])
                )
            for emitted, chance in ways.items():
                grown = (text + emitted)[:LENGTH]
                longer[grown] = longer.get(grown, 0.0) + probability * chance
        texts = longer
    return texts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kept", [0, 1, 2, None])
def test_s6_greedy_drafts_are_exact_at_any_keep_depth(seed: int, kept: int | None) -> None:
    target, q = tables(VOCAB, seed), drafter(seed)
    confidence = [float(row.max()) for row in q]
    found = target_only(target, q, lambda: keep_by_argmax(confidence, COSTS) if kept is None else kept)
    assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
    assert total_variation(found, target, LENGTH, VOCAB) < EXACT


MODES: dict[str, Keep] = {
    "shifted score, budget fixed before the draw": lambda q, drafts: keep_by_budget(shifted(q, drafts), 2 / 3),
    "largest probability, budget fixed": lambda q, drafts: keep_by_budget(largest(q, drafts), 2 / 3),
    "largest probability, budget chosen in the step": lambda q, drafts: keep_by_argmax(largest(q, drafts), COSTS),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_s6_sampled_drafts_are_exact_where_the_score_cannot_see_the_draw(mode: str, seed: int) -> None:
    target, q = tables(VOCAB, seed), drafter(seed)
    found = distribution(target, q, MODES[mode], LENGTH)
    assert total_variation(found, target, LENGTH, VOCAB) < EXACT


@pytest.mark.parametrize("score", [drawn, shifted])
def test_s6_sampled_drafts_are_biased_where_the_draw_decides_how_many_are_verified(
    score: Callable[[Probs, tuple[int, ...]], list[float]],
) -> None:
    def keep(q: Probs, drafts: tuple[int, ...]) -> int:
        row = score(q, drafts)
        return keep_by_budget(row, 2 / 3) if score is drawn else keep_by_argmax(row, EDGE_COSTS)

    worst = 0.0
    for seed in range(40):
        target, q = tables(VOCAB, seed), drafter(seed)
        worst = max(worst, total_variation(distribution(target, q, keep, LENGTH), target, LENGTH, VOCAB))
    assert worst > 0.05


def chi_square(
    seen: dict[tuple[int, ...], int], wanted: dict[tuple[int, ...], float], trials: int
) -> tuple[float, int]:
    """Statistic and degrees of freedom; rare texts are counted as one, so that every cell expects enough."""
    common = [text for text, expectation in wanted.items() if expectation >= 10]
    cells = [(seen.get(text, 0), wanted[text]) for text in common]
    rest = trials - sum(expectation for _, expectation in cells)
    if rest > 1:
        cells.append((trials - sum(found for found, _ in cells), rest))
    return sum((found - expectation) ** 2 / expectation for found, expectation in cells), len(cells) - 1


def small_script() -> Script:
    """Four tokens, whose probabilities differ from state to state."""
    script = Script(258, 256, 1e9, seed=4)
    script.logits[:, 4:] = -40.0
    script.argmax[:] = script.logits.argmax(axis=1)
    return script


@pytest.mark.parametrize("policy", ["dflash", "ratio:0.5"])
def test_s6_a_hundred_thousand_requests_at_temperature_1_follow_the_target(policy: str) -> None:
    script = small_script()
    engine = scripted_engine(
        policy, script=script, max_batch=64, max_len=16, draft_length=2, block_size=16, max_queue=TRIALS
    )
    for seed in range(TRIALS):
        engine.submit(Request(f"r{seed}", (0, 1), LENGTH, SamplingParams(1.0, seed=seed)))
    texts: dict[str, tuple[int, ...]] = {}
    seen: dict[tuple[int, ...], int] = {}
    while engine.has_work:
        for event in engine.step():
            text = texts.pop(event.request_id, ()) + event.tokens
            if event.final:
                seen[text] = seen.get(text, 0) + 1
            else:
                texts[event.request_id] = text
    wanted: dict[tuple[int, ...], float] = {}
    for text in itertools.product(range(4), repeat=LENGTH):
        wanted[text] = float(TRIALS)
        for place, token in enumerate(text):
            weights = np.exp(script.logits[script.state([0, 1, *text[:place]])].astype(np.float64))
            wanted[text] *= float(weights[token] / weights.sum())
    assert sum(seen.values()) == TRIALS
    for length in range(1, LENGTH + 1):  # positions 1..3, each with all before it
        marginal_seen: dict[tuple[int, ...], int] = {}
        marginal_wanted: dict[tuple[int, ...], float] = {}
        for text, count in seen.items():
            marginal_seen[text[:length]] = marginal_seen.get(text[:length], 0) + count
        for text, expectation in wanted.items():
            marginal_wanted[text[:length]] = marginal_wanted.get(text[:length], 0.0) + expectation
        statistic, freedom = chi_square(marginal_seen, marginal_wanted, TRIALS)
        # The seeds are fixed, so the outcome is too; a thousandth of all fair outcomes lie above.
        assert statistic < freedom + 3.1 * (2 * freedom) ** 0.5 + 5, (length, statistic, freedom)
