"""The block pool gives every block to one owner at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcut_trt.kv.paged import BlockPool
from dcut_trt.types import IntArray


def test_all_or_nothing() -> None:
    pool = BlockPool(4, 16)
    table = pool.allocate(3)
    assert table is not None
    assert table.tolist() == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.free == 1
    pool.release(table)
    assert pool.free == 4


def test_a_second_release_is_noticed() -> None:
    pool = BlockPool(2, 16)
    table = pool.allocate(2)
    assert table is not None
    pool.release(table)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(table)


@given(st.lists(st.integers(-5, 6), max_size=60))
def test_no_block_has_two_owners_and_none_is_lost(actions: list[int]) -> None:
    """A number above 0 asks for that many blocks; any other gives the oldest table back."""
    pool = BlockPool(20, 16)
    held: list[IntArray] = []
    for action in actions:
        if action > 0:
            free = pool.free
            table = pool.allocate(action)
            assert (table is None) == (action > free)
            if table is not None:
                assert len(table) == action
                held.append(table)
        elif held:
            pool.release(held.pop(0))
        owned = [int(block) for table in held for block in table]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(20))
        assert len(owned) + pool.free == 20
