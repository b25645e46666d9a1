"""dcut-trt simulate: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcut_server.cli import main

QUICK = ["--steps", "20", "--warm-up", "5", "--concurrency", "16,32"]


def test_simulate_prints_each_policy_at_each_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--policies", "dflash,ratio:0.5,dcut,auto,oracle", *QUICK]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [(row[1].strip(), row[2].strip()) for row in rows] == [
        (live, policy) for live in ("16", "32") for policy in ("dflash", "ratio:0.5", "dcut", "auto", "oracle")
    ]
    assert float(rows[0][4]) == 1
    assert float(rows[1][4]) > 1.2


def test_simulate_writes_what_a_report_reads(tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    flags = [
        "--cost",
        "h800",
        "--trace",
        "smollm2-gsm8k",
        "--budgets",
        "any",
        "--policies",
        "dflash,auto:-score-budget",
    ]
    assert main(["simulate", *flags, "--json", str(out), *QUICK]) == 0
    document = json.loads(out.read_text())
    assert (document["schema"], document["kind"]) == (1, "dcut-trt simulation")
    assert [cell["policy"] for cell in document["cells"]] == ["dflash", "auto:-score-budget"] * 2
    assert all(cell["keep_ratio"] == 1 for cell in document["cells"][::2])
    assert all(0 < cell["keep_ratio"] <= 1 and cell["tau"] > 1 for cell in document["cells"])
    assert document["cells"][0]["device"] in document["cost_tables"]


def test_simulate_is_repeatable_and_hangs_on_its_seed(tmp_path: Path) -> None:
    found = []
    for seed in ("1", "1", "2"):
        out = tmp_path / f"{len(found)}.json"
        main(["simulate", "--policies", "dcut", "--seed", seed, "--json", str(out), *QUICK])
        found.append(json.loads(out.read_text())["cells"])
    assert found[0] == found[1] != found[2]


def test_a_profiled_table_is_a_machine_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "cost_table.json"
    costs = {"batches": [1, 8], "ratios": [0.25, 1.0], "cost_ms": [[5, 6], [9, 30]], "plain_ms": [3, 7]}
    table.write_text(json.dumps(costs | {"fingerprint": "some machine", "measured_at": "today"}))
    flags = ["--trace", "smollm2-mt-bench", "--concurrency", "8", "--steps", "10"]
    assert main(["simulate", "--cost", str(table), "--policies", "plain,dflash,dcut", *flags]) == 0
    assert "some machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--cost", "h100"], "h100"),
        (["--trace", "nowhere.npz"], "nowhere.npz: not a trace"),
        (["--policies", "dflash,fastest"], "policy='fastest'"),
        (["--policies", ","], "--policies"),
        (["--policies", "plain"], "'plain'"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--warm-up", "-1"], "--warm-up -1"),
        (["--seed", "-1"], "--seed -1"),
        (["--concurrency", "128"], "concurrency=128: must be 1 to 64"),
        (["--json", "/nowhere/s.json"], "--json /nowhere/s.json"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *flags]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--requests", "0"], "--requests 0: must be at least 1"),
        (["--max-tokens", "1"], "--max-tokens 1: must be at least 2"),
        (["--out", "/nowhere/t.npz"], "--out /nowhere/t.npz"),
        ([], "bundle"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", str(tmp_path / "bundle"), "--out", str(tmp_path / "t.npz"), *flags]) == 2
    assert told in capsys.readouterr().err
