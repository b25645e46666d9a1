"""Profiles: every batch and ratio that can occur has one, and impossible ones are refused by name."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_engines.build_progress import Phases
from dcut_engines.tensorrt_profiles import (
    GraphInput,
    Layout,
    PlanError,
    ProfileSpec,
    cache_slots,
    check_profile,
    drafter_profiles,
    target_profiles,
)
from dcut_trt.spec.packing import budget, captured_batches, token_buckets

LAYOUTS = st.builds(
    Layout,
    ratios=st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0]), min_size=1, unique=True).map(tuple),
    max_batch=st.integers(1, 64),
    block_size=st.integers(2, 16),
    prefill_chunk=st.integers(1, 512),
)


def takes(profile: ProfileSpec, **sizes: int) -> bool:
    return all(profile.dims[dim][0] <= size <= profile.dims[dim][2] for dim, size in sizes.items())


@given(LAYOUTS)
def test_every_bucket_has_one_profile_of_exactly_its_rows(layout: Layout) -> None:
    buckets = token_buckets(layout.ratios, layout.batches, layout.block_size)
    verify = [profile for profile in target_profiles(layout) if profile.kind == "verify"]
    assert [profile.name for profile in verify] == [f"verify-{rows}" for rows in buckets]
    for profile, rows in zip(verify, buckets, strict=True):
        exact = (rows,) * 3 if rows > 1 else (1, 2, 2)
        assert profile.dims["K"] == profile.dims["H"] == exact
        assert profile.dims["W"] == (layout.block_size,) * 3


@given(LAYOUTS)
def test_any_batch_at_any_ratio_fits_the_next_bucket(layout: Layout) -> None:
    buckets = token_buckets(layout.ratios, layout.batches, layout.block_size)
    profiles = {profile.name: profile for profile in target_profiles(layout)}
    for batch in range(1, layout.max_batch + 1):
        assert takes(profiles["decode"], K=batch, B=batch, W=1, H=batch, S=0)
        for ratio in layout.ratios:
            rows = next(bucket for bucket in buckets if bucket >= budget(ratio, batch, layout.block_size))
            assert takes(profiles[f"verify-{rows}"], K=rows, B=batch, B_plus_1=batch + 1, H=rows, S=rows)


@given(LAYOUTS)
def test_every_batch_has_one_drafting_profile_that_holds_a_whole_step(layout: Layout) -> None:
    drafting = [profile for profile in drafter_profiles(layout) if profile.kind == "draft"]
    assert [profile.dims["B"][2] for profile in drafting] == list(captured_batches(layout.max_batch))
    for batch in range(1, layout.max_batch + 1):
        (profile,) = [profile for profile in drafting if takes(profile, B=batch)]
        assert takes(profile, C=1, W=2 * layout.block_size)
        assert takes(profile, C=batch * layout.block_size)


@given(LAYOUTS, st.integers(1, 4096))
def test_windows_stay_inside_the_cache(layout: Layout, max_len: int) -> None:
    """A window starts no later than the last committed token, and a prefill's no later than its first."""
    slots = cache_slots(max_len, layout.block_size)
    for profile in (*target_profiles(layout), *drafter_profiles(layout)):
        if profile.kind != "prefill":
            assert max_len - 1 + profile.dims["W"][2] <= slots


@given(LAYOUTS)
def test_no_profile_is_of_one_row_alone(layout: Layout) -> None:
    for profile in target_profiles(layout):
        assert min(profile.dims["K"][2], profile.dims["H"][2]) >= 2


@given(LAYOUTS)
def test_they_pass_our_own_check(layout: Layout) -> None:
    target = [GraphInput(f"t{dim}", "i32", (dim,)) for dim in ("K", "B", "B_plus_1", "W", "H", "S")]
    drafter = [GraphInput(f"d{dim}", "i32", (dim, 8)) for dim in ("C", "B", "B_plus_1", "W")]
    for profiles, inputs in ((target_profiles(layout), target), (drafter_profiles(layout), drafter)):
        for profile in profiles:
            check_profile(profile, inputs)


def test_shapes_put_ranges_in_place_of_names() -> None:
    profile = ProfileSpec("p", "verify", {"B": (1, 2, 4)})
    cache = GraphInput("key_cache.0", "fp16", ("B", 2, 80, 16))
    assert cache.shapes(profile) == ((1, 2, 80, 16), (2, 2, 80, 16), (4, 2, 80, 16))


INPUTS = (GraphInput("token_ids", "i32", ("K",)), GraphInput("key_cache.0", "fp16", ("B", 2, 8, 16)))
INPUTS += (GraphInput("subsequence_begins", "i32", ("B_plus_1",)),)
GOOD = ProfileSpec("verify-8", "verify", {"K": (8, 8, 8), "B": (1, 2, 4), "B_plus_1": (2, 3, 5)})


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"K": None}, "profile verify-8: dimension K of input token_ids has no range"),
        ({"B": None}, "profile verify-8: dimension B of input key_cache.0 has no range"),
        ({"K": (8, 4, 8)}, r"dimension K = \[8, 4, 8\]: 0 <= min <= opt <= max must hold"),
        ({"K": (1, 9, 8)}, r"dimension K = \[1, 9, 8\]: 0 <= min <= opt <= max must hold"),
        ({"K": (-1, 8, 8)}, r"dimension K = \[-1, 8, 8\]: 0 <= min"),
        ({"K": (1, 1, 2**31)}, r"dimension K = \[1, 1, 2147483648\]: the largest dimension is 2147483647"),
        ({"Q": (1, 1, 1)}, r"dimension Q = \[1, 1, 1\]: no input has it; the graph's are B, B_plus_1, K"),
        ({"B_plus_1": (2, 3, 4)}, r"B_plus_1 = \[2, 3, 4\] contradicts B = \[1, 2, 4\]: it must be one more"),
    ],
)
def test_an_impossible_profile_is_refused(dims: dict[str, tuple[int, int, int] | None], message: str) -> None:
    check_profile(GOOD, INPUTS)
    merged = {name: values for name, values in {**GOOD.dims, **dims}.items() if values is not None}
    with pytest.raises(PlanError, match=message):
        check_profile(dataclasses.replace(GOOD, dims=merged), INPUTS)


def test_nested_phases_make_one_bar_that_never_goes_back() -> None:
    seen: list[float] = []
    phases = Phases(seen.append)
    phases.start("build", None, 2)
    phases.start("optimize", "build", 4)
    for step in range(4):
        phases.step("optimize", step)
    phases.finish("optimize")
    phases.step("build", 0)
    phases.start("time", "build", 2)
    phases.step("time", 0)
    phases.step("unknown", 0)
    phases.finish("time")
    phases.step("build", 1)
    phases.finish("build")
    assert seen == [0.125, 0.25, 0.375, 0.5, 0.75, 1.0]
    assert math.isclose(seen[-1], 1.0)
