"""The cost table as TensorRT-LLM's draft_len_schedule: the choice against trying every depth, and the file."""

from __future__ import annotations

import argparse
import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dcut_server.cli_export import add_export_schedule_parser, run_export_schedule
from dcut_server.draft_schedule import check_acceptance, measured_acceptance, schedule, to_yaml, uniform_depths
from dcut_trt.errors import BundleError, CostTableError, DcutError, UnsupportedOption
from dcut_trt.manifest import MANIFEST_NAME, DrafterSpec, Manifest, TargetSpec, TokenizerSpec
from dcut_trt.spec.cost_table import CostTable, save_cost_table

PAPER = json.loads((Path(__file__).parents[1] / "fixtures" / "paper_cost_tables.json").read_text())


def table(costs: list[list[float]], plain: list[float], batches: list[int], ratios: list[float]) -> CostTable:
    return CostTable(tuple(batches), tuple(ratios), np.array(costs), np.array(plain), "here", "2026-01-02T03:04:05")


def paper_table(device: str) -> CostTable:
    """The paper has no plain column; a plain step costs what the smallest budget does, without its drafter."""
    costs = PAPER["cost_ms"][device]
    return table(costs, [0.8 * row[0] for row in costs], PAPER["batches"], PAPER["ratios"])


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    ratios = draw(st.lists(st.sampled_from([0.2, 0.25, 0.5, 0.6, 0.75, 1.0]), min_size=1, max_size=4, unique=True))
    batches = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=4)))
    milliseconds = st.floats(0.5, 50)
    costs = [[draw(milliseconds) for _ in ratios] for _ in batches]
    return table(costs, [draw(milliseconds) for _ in batches], batches, ratios)


ACCEPTANCE = st.lists(st.floats(0, 1), min_size=1, max_size=15).map(lambda values: sorted(values, reverse=True))


def straight_line(wanted: float, points: list[tuple[float, float]]) -> float:
    """Between measured points on a line; before the first, its cost."""
    points = sorted(points)
    if wanted <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if left <= wanted <= right:
            return low + (high - low) * (wanted - left) / (right - left)
    return points[-1][1]


def test_a_table_without_plain_steps_is_refused() -> None:
    costs = dataclasses.replace(paper_table("H20"), plain_ms=None)
    with pytest.raises(CostTableError, match="plain_ms"):
        uniform_depths(costs, [0.9] * 15)


@given(tables(), ACCEPTANCE)
def test_the_depth_is_the_best_of_trying_every_depth(costs: CostTable, acceptance: list[float]) -> None:
    length = len(acceptance)
    deepest = length
    for row, chosen in enumerate(uniform_depths(costs, acceptance)):
        rates = {0: 1 / costs.plain_ms[row]}
        for depth in range(1, deepest + 1):
            wanted = (depth + 1) / (length + 1)
            if wanted <= max(costs.ratios) + 1e-9:
                points = list(zip(costs.ratios, costs.cost_ms[row].tolist(), strict=True))
                rates[depth] = (1 + sum(acceptance[:depth])) / straight_line(wanted, points)
        assert rates[chosen.depth] == pytest.approx(max(rates.values()))
        assert chosen.tokens_per_ms == pytest.approx(chosen.batch * rates[chosen.depth])
        deepest = chosen.depth if row == 0 else deepest


@given(tables(), ACCEPTANCE)
def test_the_schedule_is_one_that_tensorrt_llm_takes(costs: CostTable, acceptance: list[float]) -> None:
    """Its rules: positive keys, the smallest key's length is max_draft_len, and none is longer."""
    depths = uniform_depths(costs, acceptance)
    if depths[0].depth == 0:
        with pytest.raises(UnsupportedOption, match="plain decoding is fastest"):
            to_yaml(depths, "drafter", "here")
        return
    config = yaml.safe_load(to_yaml(depths, "drafter", "here"))["speculative_config"]
    lengths = config["draft_len_schedule"]
    assert min(lengths) >= 1
    assert lengths[min(lengths)] == config["max_draft_len"] == max(lengths.values()) <= len(acceptance)
    for entry in depths:  # a key is the largest batch of its length
        assert lengths[min(key for key in lengths if key >= entry.batch)] == entry.depth


@pytest.mark.parametrize(("device", "batch"), [("H20", 64), ("H800", 64)])
def test_the_papers_machines_draft_less_as_batches_grow(device: str, batch: int) -> None:
    acceptance = [0.8**depth for depth in range(1, 16)]
    by_batch = {entry.batch: entry.depth for entry in uniform_depths(paper_table(device), acceptance)}
    assert by_batch[1] > by_batch[batch]
    if device == "H20":  # flat at batch 1, and linear in rows at batch 64
        assert by_batch[1] >= 10
        assert by_batch[64] <= 4


def test_equal_neighbours_become_one_entry() -> None:
    costs = table([[4, 5], [4, 5], [4, 20], [4, 40]], [4, 4, 4, 1], [1, 2, 4, 8], [0.5, 1.0])
    assert schedule(uniform_depths(costs, [0.9, 0.8, 0.7])) == {2: 3, 4: 1, 8: 0}


@pytest.mark.parametrize(
    ("acceptance", "message"),
    [
        ([0.5], "acceptance=0.5: the drafter drafts 3 tokens, so as many are needed"),
        ([0.5, 0.6, 0.1], "acceptance=0.5,0.6,0.1: must fall from depth to depth, within"),
        ([1.1, 0.6, 0.1], "must fall from depth to depth"),
        ([0.5, 0.1, -0.1], "must fall from depth to depth"),
        ([float("nan"), 0.1, 0.0], "must fall from depth to depth"),
    ],
)
def test_acceptance_that_nothing_can_have(acceptance: list[float], message: str) -> None:
    check_acceptance([1.0, 0.5, 0.0], 3)
    with pytest.raises(UnsupportedOption, match=message):
        check_acceptance(acceptance, 3)


# --- the command


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    directory = tmp_path / "bundle"
    directory.mkdir()
    target = TargetSpec("t", "00", "llama", 2, 32, 4, 2, 16, 272, 128)
    drafter = DrafterSpec("z-lab/Some-DFlash: b4", "00", 1, 2, 16, 4, 3, (0,), True, 272)
    tokenizer = TokenizerSpec("00", 272, None, (0,))
    shape = {"ratios": (0.5, 1.0), "captured_batches": (1, 2, 4, 8), "token_buckets": (2, 4), "draft_length": 3}
    names = {"schema": 1, "key": "k", "backend": "onnx", "precision": "fp16", "max_batch": 8, "max_len": 64}
    manifest = Manifest(
        **shape, **names, target=target, drafter=drafter, tokenizer=tokenizer, tensors={}, files={}, versions={}
    )
    (directory / MANIFEST_NAME).write_text(manifest.to_json())
    costs = table([[4, 5], [4, 5], [4, 20], [4, 40]], [4, 4, 4, 1], [1, 2, 4, 8], [0.5, 1.0])
    save_cost_table(costs, directory / "cost_table.json")
    return directory


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_export_schedule_parser(parser.add_subparsers())
    return run_export_schedule(parser.parse_args(["export-schedule", *map(str, arguments)]))


@pytest.mark.parametrize("as_file", [False, True])
def test_a_bundle_is_exported(bundle: Path, as_file: bool, capsys: pytest.CaptureFixture[str]) -> None:
    acceptance = "0.9,0.8,0.7"
    if as_file:
        (bundle / "acceptance.json").write_text("[0.9, 0.8, 0.7]")
        acceptance = str(bundle / "acceptance.json")
    assert run(bundle, "--acceptance", acceptance, "--out", bundle / "schedule.yaml") == 0
    text = (bundle / "schedule.yaml").read_text()
    assert yaml.safe_load(text) == {
        "speculative_config": {
            "decoding_type": "DFlash",
            "speculative_model": "z-lab/Some-DFlash: b4",
            "max_draft_len": 3,
            "draft_len_schedule": {2: 3, 4: 1, 8: 0},
        }
    }
    assert "measured 2026-01-02T03:04:05" in text
    assert "3.40" in capsys.readouterr().out


def test_acceptance_is_taken_from_a_report(bundle: Path) -> None:
    """Three times as many blocks at four requests as at one, so three quarters of the weight."""
    cells = [
        {"policy": "plain", "acceptance": None, "steps": 100, "mean_batch": 1.0},
        {"policy": "dflash", "acceptance": [0.8, 0.4, 0.0], "steps": 30, "mean_batch": 1.0},
        {"policy": "dflash", "acceptance": [1.0, 0.8, 0.8], "steps": 30, "mean_batch": 3.0},
        {"policy": "dcut", "acceptance": [0.1, 0.1, 0.1], "steps": 90, "mean_batch": 2.0},
    ]
    assert measured_acceptance({"cells": cells}) == pytest.approx([0.95, 0.7, 0.6])
    (bundle / "bench.json").write_text(json.dumps({"kind": "dcut-trt bench", "cells": cells}))
    assert run(bundle, "--acceptance", bundle / "bench.json", "--out", bundle / "from_report.yaml") == 0
    assert run(bundle, "--acceptance", "0.95,0.7,0.6", "--out", bundle / "from_numbers.yaml") == 0
    assert (bundle / "from_report.yaml").read_text() == (bundle / "from_numbers.yaml").read_text()


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([], "has no acceptance of policy dflash"),
        ([{"policy": "dflash", "steps": 1, "mean_batch": 1.0}], "has no acceptance of policy dflash"),
        ([{"policy": "dcut", "acceptance": [0.5, 0.5, 0.5]}], "has no acceptance of policy dflash"),
        ([{"policy": "dflash", "acceptance": [0.5, 0.5], "steps": 1, "mean_batch": 1.0}], "drafts 3 tokens"),
        ([{"acceptance": [0.5, 0.5, 0.5]}], "bench.json: not as dcut-trt bench writes it: KeyError"),
        (None, "bench.json: not as dcut-trt bench writes it: TypeError"),
    ],
)
def test_a_report_without_measured_acceptance_is_refused(bundle: Path, cells: object, message: str) -> None:
    (bundle / "bench.json").write_text(json.dumps({"cells": cells}))
    with pytest.raises(UnsupportedOption, match=message):
        run(bundle, "--acceptance", bundle / "bench.json", "--out", bundle / "schedule.yaml")


@pytest.mark.parametrize(
    ("acceptance", "error", "message"),
    [
        ("0.9,0.8", UnsupportedOption, "drafts 3 tokens"),
        ("/no/such.json", UnsupportedOption, "--acceptance /no/such.json: neither numbers nor a readable JSON file"),
        ("high", UnsupportedOption, "--acceptance high: neither numbers"),
    ],
)
def test_what_cannot_be_exported(bundle: Path, acceptance: str, error: type[DcutError], message: str) -> None:
    with pytest.raises(error, match=message):
        run(bundle, "--acceptance", acceptance, "--out", bundle / "schedule.yaml")
    assert not (bundle / "schedule.yaml").exists()


def test_files_that_are_not_what_they_should_be(bundle: Path) -> None:
    (bundle / "list.json").write_text('{"tau": 3}')
    with pytest.raises(UnsupportedOption, match="a JSON list of numbers is needed"):
        run(bundle, "--acceptance", bundle / "list.json", "--out", bundle / "schedule.yaml")
    with pytest.raises(UnsupportedOption, match="--out /no/such/place: No such file"):
        run(bundle, "--acceptance", "1,1,1", "--out", "/no/such/place")
    with pytest.raises(BundleError, match="is not an engine bundle"):
        run(bundle.parent, "--acceptance", "1,1,1", "--out", bundle / "schedule.yaml")
    (bundle / "cost_table.json").unlink()
    with pytest.raises(CostTableError, match=r"cost_table\.json: not a cost table"):
        run(bundle, "--acceptance", "1,1,1", "--out", bundle / "schedule.yaml")
