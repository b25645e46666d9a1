"""One cluster for all tests of this folder, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import MAX_BATCH, PEER, Cluster, cluster
from small_bundles import small_bundle


@pytest.fixture(scope="session")
def loop_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def two_workers(
    loop_runner: asyncio.Runner, smollm2_bundle_fp32: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two servers of SmolLM2 in fp32, where greedy output does not depend on the batch; a worker for each."""
    if not PEER.is_file():
        pytest.skip("Dynamo is not installed: bash tests/dynamo/setup.sh")
    folder = tmp_path_factory.mktemp("dynamo")
    here = cluster(small_bundle(smollm2_bundle_fp32, folder / "bundle", MAX_BATCH), folder)
    yield loop_runner.run(here.__aenter__())
    loop_runner.run(here.__aexit__(None, None, None))
