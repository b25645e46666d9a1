"""Bias, min_tokens mask and penalties equal their definition, written as a loop over the vocabulary."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from naive_semantics import adjusted_by_definition

from dcut_trt.adjusting import LogitAdjuster, TokenCounts
from dcut_trt.types import SamplingParams

VOCAB = 12
ids = st.integers(0, VOCAB - 1)
samplings = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.4, 1.1, 2.0]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 3.0, 100.0]), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
)


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB),
    samplings,
    st.lists(ids, min_size=1, max_size=10),
    st.lists(ids, max_size=20),
    st.integers(0, 20),
    st.sets(ids, max_size=2),
)
def test_adjusted_logits_equal_the_definition(
    values: list[float],
    sampling: SamplingParams,
    prompt: list[int],
    output: list[int],
    min_tokens: int,
    stop_ids: set[int],
) -> None:
    raw = np.array(values, np.float32)
    adjuster = LogitAdjuster(prompt, sampling, min_tokens, stop_ids)
    for length in range(len(output) + 1):
        before = raw.copy()
        found = adjuster.adjusted(raw)
        np.testing.assert_array_equal(raw, before)  # a device's buffer may stand behind it
        mask = stop_ids if length < min_tokens else set()
        wanted = adjusted_by_definition(raw, sampling, prompt, output[:length], mask)
        np.testing.assert_array_equal(found, wanted)
        if length < len(output):
            adjuster.add(output[length])


@given(st.lists(st.integers(0, 300), max_size=20), st.lists(st.integers(0, 300), max_size=60))
def test_counts_equal_counting_anew(prompt: list[int], output: list[int]) -> None:
    counts = TokenCounts(prompt)
    for token in output:
        counts.add(token)
    assert dict(zip(counts.ids.tolist(), counts.output_counts.tolist(), strict=True)) == {
        token: output.count(token) for token in {*prompt, *output}
    }


def test_nothing_is_copied_where_nothing_changes() -> None:
    raw = np.zeros(VOCAB, np.float32)
    assert LogitAdjuster((1, 2), SamplingParams(1.0), 0, (3,)).adjusted(raw) is raw
