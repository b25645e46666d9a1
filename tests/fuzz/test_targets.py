"""Broken files and messages are refused with one of our errors: never a crash, never another exception."""

from __future__ import annotations

import pytest
from mutate import mutations
from targets import TARGETS, seeds, survive

COUNT = 1500


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_taken_up_to_what_they_name(name: str) -> None:
    if name == "manifest":  # its files are not there
        assert not survive(name, seeds(name)[0])
    else:
        assert all(survive(name, data) for data in seeds(name))


@pytest.mark.parametrize("name", TARGETS)
def test_broken_inputs_are_refused_or_handled(name: str) -> None:
    taken = sum(survive(name, data) for seed, valid in enumerate(seeds(name)) for data in mutations(valid, COUNT, seed))
    assert taken < COUNT * len(seeds(name)), "the mutations break nothing"
