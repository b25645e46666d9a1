"""A minute of everything mixed on a served real model: nothing is lost, nothing leaks, answers stay the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcut_server.cli import main
from dcut_server.soak.cli import Check, faults_of
from dcut_server.soak.load import Tally


def test_a_minute_of_mixed_load_loses_and_leaks_nothing(smollm2_bundle_fp32: Path, tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    flags = ["--minutes", "1", "--policy", "ratio:0.5", "--no-profile", "--json", str(report)]
    flags += ["--max-growth-mib", "512"]  # a minute is still warm-up: KV blocks are met for the first time
    assert main(["soak", str(smollm2_bundle_fp32), *flags]) == 0
    seen = json.loads(report.read_text())
    assert seen["faults"] == []
    assert {"normal", "known", "cancel", "abort", "deadline", "slow", "invalid"} == set(seen["kinds"])
    assert seen["outcomes"]["INVALID_ARGUMENT"] == seen["kinds"]["invalid"]


def check(**changes: float) -> Check:
    fields = {"at_s": 1.0, "requests": 9, "rss_mib": 100.0, "handles": 10, "threads": 8, "free_kv_blocks": 64}
    return Check(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rss_mib": 170.0}, "memory grew from 100 to 170 MiB"),
        ({"handles": 13}, "handles grew from 10 to 13"),
        ({"threads": 11}, "threads grew from 8 to 11"),
        ({"free_kv_blocks": 63}, "free KV blocks when idle: [63, 64]"),
    ],
)
def test_what_leaks_is_named(change: dict[str, float], named: str) -> None:
    assert faults_of([check(), check()], Tally(), 64) == []
    (fault,) = faults_of([check(), check(**change)], Tally(), 64)
    assert fault.startswith(named)


def test_lost_streams_and_changed_answers_are_faults() -> None:
    tally = Tally(lost=["normal: UNAVAILABLE: x"], changed=["Why"])
    assert faults_of([check(), check()], tally, 64) == ["normal: UNAVAILABLE: x", "another answer to 'Why'"]
