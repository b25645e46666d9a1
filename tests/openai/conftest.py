"""One real server with a gateway for all tests here that leave it running."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import MAX_BATCH, Served, prepared_table, scripted, served
from small_bundles import small_bundle


@pytest.fixture(scope="session")
def openai_server(smollm2_bundle_fp32: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("openai")
    table = str(prepared_table(folder))
    bundle = small_bundle(smollm2_bundle_fp32, folder / "bundle", MAX_BATCH)
    with served(bundle, folder, "--policy", "dcut", "--no-profile", "--cost-table", table) as server:
        yield server


@pytest.fixture(scope="module")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with scripted(tmp_path_factory.mktemp("scripted"), delay_s=0.01) as server:
        yield server
