"""These tests share the scripted servers of tests/server, and one tritonserver in front of one of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server"))

from server_process import address_of, process
from triton_process import PEER, Triton, triton


@pytest.fixture(scope="session")
def dcut_address(peer: None) -> Iterator[str]:
    """A dcut-trt server of 8 slots over the scripted model, 5 ms a step."""
    with process("0.005", "1") as server:
        yield address_of(server)


@pytest.fixture(scope="session")
def peer() -> None:
    if not PEER.is_file():
        pytest.skip("tritonserver is not installed: bash tests/tritonserver/setup.sh")


@pytest.fixture(scope="session")
def tritonserver(dcut_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    with triton(dcut_address, tmp_path_factory.mktemp("triton")) as running:
        yield running
