"""Packed rows in two orders, and feature rows that stay on the device."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from host_device import HostDevice
from hypothesis import given
from hypothesis import strategies as st

from dcut_trt.backends.tensorrt_device import Block, Transfers
from dcut_trt.backends.tensorrt_features import FeatureStore, row_indices, split
from dcut_trt.backends.tensorrt_pack import begins, packed_rows

WIDTH = 12  # bytes of a row of three floats


@given(st.data())
def test_packed_rows_equal_following_every_row(data: st.DataObject) -> None:
    lengths = np.array(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=7)), np.int32)
    row_of = np.array(data.draw(st.permutations(range(len(lengths)))), np.int32)
    place = {}
    for row in range(len(lengths)):
        request = row_of.tolist().index(row)
        for depth in range(lengths[request]):
            place[request, depth] = len(place)
    expected = [place[request, depth] for request, length in enumerate(lengths) for depth in range(length)]
    assert packed_rows(row_of, lengths).tolist() == expected


def test_begins() -> None:
    assert begins(np.array([3, 1, 2], np.int32)).tolist() == [0, 3, 4, 6]


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


def written(device: HostDevice, store: FeatureStore, start: int) -> np.ndarray:
    """The target's call: new rows in the whole output."""
    values = np.arange(start, start + 3 * store.capacity, dtype=np.float32).reshape(-1, 3)
    staged = device.pinned(store.output.nbytes)
    staged[:] = values.view(np.uint8).ravel()
    device.upload(store.output, staged)
    return values


def fetched(device: HostDevice, transfers: Transfers, store: FeatureStore, pieces: list) -> np.ndarray:
    count = sum(map(len, pieces))
    block = Block(transfers, {"rows": (np.int32, count)})
    block.upload({"rows": row_indices(pieces)})
    to = device.allocate(count * WIDTH)
    store.gather(to, pieces, block.parts["rows"])
    device.synchronize()
    return to.bytes.view(np.float32).reshape(-1, 3).copy()


def test_rows_that_are_kept_outlive_two_calls_and_others_do_not(device: HostDevice) -> None:
    transfers = Transfers(device)
    store = FeatureStore(transfers, device.allocate(8 * WIDTH), WIDTH)
    first = written(device, store, 0)
    early = store.rows(np.array([5, 0, 7, 2], np.int32))
    kept = [early[1:3].copy(), early[3:].copy()]
    lost = early[:1]
    store.make_way()
    second = written(device, store, 1000)
    late = store.rows(np.arange(8, dtype=np.int32))[2:5].copy()
    rows = fetched(device, transfers, store, [kept[0], late, kept[1], lost])
    np.testing.assert_array_equal(rows, [*first[[0, 7]], *second[2:5], first[2], second[5]])
    store.make_way()
    written(device, store, 2000)
    rows = fetched(device, transfers, store, [late[1:], kept[0]])
    np.testing.assert_array_equal(rows, [*second[3:5], *first[[0, 7]]])


def test_rows_that_nobody_holds_any_more_are_not_copied(device: HostDevice) -> None:
    store = FeatureStore(Transfers(device), device.allocate(8 * WIDTH), WIDTH)
    kept = store.rows(np.arange(8, dtype=np.int32)).copy()
    del kept
    gc.collect()
    free = device.free_bytes()
    store.make_way()
    assert device.gathered == 0
    assert device.free_bytes() == free


@pytest.mark.parametrize("count", range(7))
def test_split(device: HostDevice, count: int) -> None:
    store = FeatureStore(Transfers(device), device.allocate(8 * WIDTH), WIDTH)
    rows = store.rows(np.array([3, 1, 4, 0, 5, 2], np.int32))
    head, rest = split([rows[:2], rows[2:5], rows[5:]], count)
    assert row_indices(head).tolist() == rows.rows[:count].tolist()
    assert row_indices(rest).tolist() == rows.rows[count:].tolist()
    assert all(len(piece) for piece in (*head, *rest))
