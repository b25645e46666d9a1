"""Every policy keeps what it promises; names are checked before anything is loaded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from policy_inputs import selected, view_of

from dcut_trt.errors import UnsupportedOption
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.packing import budget
from dcut_trt.spec.policies import check_policy_name, make_policy
from dcut_trt.spec.rules import DCut, FixedDepth, FixedRatio, Plain
from dcut_trt.spec.selector import choose_ratio, keep_depths, prefix_log_scores, rank
from dcut_trt.types import FloatArray

RATIOS = (0.25, 0.5, 0.75, 1.0)
shapes = st.tuples(st.integers(1, 8), st.integers(1, 9))
blocks = shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=st.floats(0, 1, width=32)))


def table(*rows: tuple[float, ...], batches: tuple[int, ...] = (1,)) -> CostTable:
    return CostTable(batches, RATIOS, np.array(rows), np.ones(len(rows)), "here", "now")


@given(blocks)
def test_plain_keeps_nothing_and_never_drafts(confidence: FloatArray) -> None:
    policy = Plain()
    assert not policy.drafts
    assert policy.intend(view_of(len(confidence))).depth == 0
    selection = selected(policy, confidence)
    assert selection.keep.tolist() == [0] * len(confidence)
    assert selection.ratio is None


@given(blocks)
def test_dflash_keeps_every_draft(confidence: FloatArray) -> None:
    selection = selected(FixedDepth(), confidence)
    assert selection.keep.tolist() == [confidence.shape[1]] * len(confidence)
    assert selection.ratio == 1.0


@given(blocks, st.floats(0.01, 1))
def test_a_fixed_ratio_keeps_its_budget(confidence: FloatArray, ratio: float) -> None:
    batch, length = confidence.shape
    selection = selected(FixedRatio(ratio), confidence)
    assert selection.keep.min() >= 0
    assert selection.keep.max() <= length
    assert (selection.keep + 1).sum() == budget(ratio, batch, length + 1)
    assert selection.ratio == ratio


@given(blocks, st.lists(st.floats(0.1, 50), min_size=4, max_size=4))
def test_dcut_keeps_what_its_chosen_ratio_keeps(confidence: FloatArray, cost_ms: list[float]) -> None:
    selection = selected(DCut(table(tuple(cost_ms))), confidence)
    assert selection.ratio in RATIOS
    assert selection.keep.tolist() == selected(FixedRatio(selection.ratio), confidence).keep.tolist()


@given(blocks, st.sampled_from(["dflash", "ratio:0.25", "ratio:0.6", "dcut"]))
def test_a_device_that_follows_the_offer_keeps_the_same(confidence: FloatArray, name: str) -> None:
    batch, length = confidence.shape
    policy = make_policy(name, table((5.0, 6.0, 7.0, 8.0)))
    offer = policy.offer(batch)
    assert offer is not None
    scores = prefix_log_scores(confidence)
    ranked = rank(scores)
    ratio = offer.ratios[choose_ratio(scores, ranked, offer.ratios, offer.cost_ms)]
    keep = keep_depths(ranked, budget(ratio, batch, length + 1), batch)
    selection = selected(policy, confidence)
    assert (selection.keep.tolist(), selection.ratio) == (keep.tolist(), ratio)


def test_plain_offers_a_device_nothing() -> None:
    assert Plain().offer(4) is None


def test_dcut_reads_the_row_of_the_nearest_captured_batch() -> None:
    flat_alone_steep_at_8 = table((5.0, 5.0, 5.0, 5.0), (5.0, 10.0, 15.0, 20.0), batches=(1, 8))
    policy = DCut(flat_alone_steep_at_8)
    certain: FloatArray = np.full((8, 7), 0.7, np.float32)
    assert selected(policy, certain[:1]).ratio == 1.0
    assert selected(policy, certain[:4]).ratio == 1.0
    assert selected(policy, certain[:5]).ratio == 0.25
    assert selected(policy, certain).ratio == 0.25


@pytest.mark.parametrize("name", ["plain", "dflash", "ratio:0.25", "ratio:1"])
def test_a_policy_carries_the_name_it_was_made_by(name: str) -> None:
    assert make_policy(name, None).name == name


def test_dcut_needs_a_table() -> None:
    with pytest.raises(UnsupportedOption, match="cost table"):
        make_policy("dcut", None)
    assert make_policy("dcut", table((1.0, 2.0, 3.0, 4.0))).name == "dcut"


@pytest.mark.parametrize(
    "name", ["", "Plain", "ratio", "ratio:", "ratio:0", "ratio:1.01", "ratio:nan", "ratio:-1", "tetris"]
)
def test_an_unknown_policy_is_refused_with_what_is_offered(name: str) -> None:
    with pytest.raises(UnsupportedOption, match=r"plain, dflash, ratio:R .*, dcut"):
        check_policy_name(name)
