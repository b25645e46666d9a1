"""The CUDA device's copies, on torch's CPU tensors, against the host device's; and the staging of small arrays."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from host_device import HostDevice

from dcut_trt.backends.tensorrt_cuda import CudaDevice
from dcut_trt.backends.tensorrt_device import Block, Transfers
from dcut_trt.errors import EngineMismatch


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """Without CUDA: tensors on the CPU, no stream, nothing to wait for."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    device = CudaDevice.__new__(CudaDevice)
    device._torch, device._stream, device._place = torch, None, "cpu"
    monkeypatch.setattr(CudaDevice, "synchronize", lambda self: None)
    monkeypatch.setattr(CudaDevice, "pinned", lambda self, nbytes: np.zeros(nbytes, np.uint8))
    return device


def contents(device: Any, width: int) -> np.ndarray:
    """A table of rows of `width` bytes after every kind of copy."""
    rng = np.random.default_rng(1)
    table, gathered, rows = (device.allocate(nbytes) for nbytes in (12 * width, 5 * width + 3, 5 * 4))
    staged = device.pinned(12 * width)
    staged[:] = rng.integers(0, 256, 12 * width)
    device.upload(table, staged)
    device.move_columns(table, 4 * width, width, 3 * width, width)
    device.clear(table.part(0, width))
    indices = device.pinned(20)
    indices.view(np.int32)[:] = [11, 3, 3, 0, 7]
    device.upload(rows, indices)
    device.gather(gathered.part(0, 5 * width), table, rows, width)
    device.synchronize()
    result = device.pinned(17 * width + 3)
    device.download(result[: 12 * width], table)
    device.download(result[12 * width :], gathered)
    device.synchronize()
    return result


@pytest.mark.parametrize("width", [2, 6, 64, 1152])
def test_copies_are_those_of_the_host_device(cuda: CudaDevice, width: int) -> None:
    np.testing.assert_array_equal(contents(cuda, width), contents(HostDevice(), width))


def test_a_device_without_cuda_is_a_typed_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(EngineMismatch, match="no CUDA device"):
        CudaDevice()


def test_staging_is_used_anew_only_after_a_wait() -> None:
    """Uploads and downloads in flight keep their bytes, however many there are."""
    device = HostDevice()
    transfers = Transfers(device)
    block = Block(transfers, {"numbers": (np.int32, 50_000), "halves": (np.float32, 3)})
    for round_ in range(20):  # 20 times 200 kB: more than the staging memory
        numbers = np.arange(50_000, dtype=np.int32) + round_
        block.upload({"numbers": numbers, "halves": np.full(2, round_ / 2)})
        early = transfers.download(block.parts["numbers"], np.int32, (50_000,))
        late = transfers.download(block.parts["halves"], np.float32, (3,))
        block.upload({"numbers": -numbers})
        if round_ % 5 == 4:
            transfers.synchronize()
    assert len(device.syncs) > 4
    meter = type("Meter", (), {"time": staticmethod(lambda work: work())})()
    np.testing.assert_array_equal(early.read(meter), numbers)
    np.testing.assert_array_equal(late.read(meter), [9.5, 9.5, 0])
    assert transfers.download(block.parts["halves"], np.float32, (3,)).read(meter).tolist() == [0, 0, 0]


def test_more_than_the_staging_memory_at_once() -> None:
    transfers = Transfers(HostDevice())
    block = Block(transfers, {"numbers": (np.int32, 1 << 20)})
    numbers = np.arange(1 << 20, dtype=np.int32)
    block.upload({"numbers": numbers})
    meter = type("Meter", (), {"time": staticmethod(lambda work: work())})()
    np.testing.assert_array_equal(transfers.download(block.parts["numbers"], np.int32, (1 << 20,)).read(meter), numbers)
