"""Cost tables: lookup, states, and files that are not one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcut_trt.errors import CostTableError
from dcut_trt.spec.cost_table import ContextCost, CostTable, load_cost_table, save_cost_table

GOOD: dict[str, Any] = {
    "batches": [1, 4, 8],
    "ratios": [0.5, 1.0],
    "cost_ms": [[5.0, 5.5], [6.0, 8.0], [8.0, 12.0]],
    "plain_ms": [4.0, 5.0, 6.0],
    "fingerprint": "this machine",
    "measured_at": "2026-01-02T03:04:05+00:00",
}


FURTHER: dict[str, Any] = {
    "depths": (1, 2, 7),
    "draft_ms": np.array([[1.0, 1.5, 2.0], [2.0, 3.0, 4.0], [3.0, 5.0, 8.0]]),
    "context_ms": ContextCost(plain=0.5, request=1.5, row=0.25),
    "context_rows": 140.5,
    "switch_ms": 2.5,
}


def table(**changes: Any) -> CostTable:
    raw = GOOD | changes
    return CostTable(
        tuple(raw["batches"]),
        tuple(raw["ratios"]),
        np.array(raw["cost_ms"], np.float64),
        np.array(raw["plain_ms"], np.float64),
        raw["fingerprint"],
        raw["measured_at"],
        **{name: changes[name] for name in FURTHER if name in changes},
    )


@pytest.mark.parametrize(("batch", "row"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 1), (7, 2), (8, 2), (100, 2)])
def test_the_nearest_captured_batch_is_read_and_a_tie_goes_to_the_smaller(batch: int, row: int) -> None:
    assert table().row(batch).tolist() == GOOD["cost_ms"][row]


def test_flat_means_equal_within_five_percent_at_the_largest_batch() -> None:
    assert not table().flat
    assert table(cost_ms=[[5, 50], [6, 60], [8.0, 8.39]]).flat
    assert not table(cost_ms=[[5, 5], [6, 6], [8.0, 8.41]]).flat


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cost_ms": [[5.0, np.nan], [6, 8], [8, 12]]}, "cost_ms"),
        ({"cost_ms": [[5.0, -1.0], [6, 8], [8, 12]]}, "cost_ms"),
        ({"cost_ms": [[5.0, 0.0], [6, 8], [8, 12]]}, "cost_ms"),
        ({"plain_ms": [4.0, np.inf, 6.0]}, "plain_ms"),
        ({"cost_ms": [[5.0, 5.5], [6, 8]]}, "cost_ms"),
        ({"plain_ms": [4.0]}, "plain_ms"),
        ({"batches": [4, 1, 8]}, "batches"),
        ({"batches": [0, 4, 8]}, "batches"),
        ({"batches": [1, 1, 8]}, "batches"),
        ({"ratios": [0.0, 1.0]}, "ratios"),
        ({"ratios": [0.5, np.nan]}, "ratios"),
        ({"batches": [], "cost_ms": np.empty((0, 2)), "plain_ms": []}, "cost_ms"),
        (FURTHER | {"depths": (2, 1, 7)}, "depths"),
        (FURTHER | {"depths": (0, 1, 7)}, "depths"),
        (FURTHER | {"depths": (1, 7)}, "draft_ms"),
        (FURTHER | {"draft_ms": np.full((3, 3), np.nan)}, "draft_ms"),
        ({"depths": (1, 2, 7)}, "depths, draft_ms"),
        ({"draft_ms": np.ones((3, 3))}, "depths, draft_ms"),
        ({"context_rows": -1.0}, "context_rows"),
        ({"switch_ms": np.nan}, "switch_ms"),
    ],
)
def test_values_that_no_machine_has_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CostTableError, match=named):
        table(**changes)


def test_a_saved_table_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "cost_table.json"
    saved = table()
    save_cost_table(saved, path)
    loaded = load_cost_table(path, "this machine")
    assert loaded.state == "loaded"
    assert (loaded.batches, loaded.ratios) == (saved.batches, saved.ratios)
    np.testing.assert_array_equal(loaded.cost_ms, saved.cost_ms)
    np.testing.assert_array_equal(loaded.plain_ms, saved.plain_ms)
    assert (loaded.fingerprint, loaded.measured_at) == (saved.fingerprint, saved.measured_at)
    assert [file.name for file in tmp_path.iterdir()] == ["cost_table.json"]


@pytest.mark.parametrize("values", [(-1.0, 0.0, 0.0), (0.0, np.nan, 0.0), (0.0, 0.0, np.inf)])
def test_a_context_that_makes_steps_cheaper_is_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(CostTableError, match="context_ms"):
        ContextCost(*values)


def test_all_that_was_measured_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "cost_table.json"
    saved = table(**FURTHER)
    save_cost_table(saved, path)
    for loaded in (load_cost_table(path, "this machine"), load_cost_table(path, "another machine")):
        for field in dataclasses.fields(CostTable):
            if field.name != "state":
                np.testing.assert_array_equal(getattr(loaded, field.name), getattr(saved, field.name), field.name)


def test_files_from_before_and_without_plain_steps_load(tmp_path: Path) -> None:
    path = tmp_path / "cost_table.json"
    path.write_text(json.dumps(GOOD | {"plain_ms": None}))
    loaded = load_cost_table(path, "this machine")
    assert [getattr(loaded, name) for name in ("plain_ms", *FURTHER)] == [None] * (1 + len(FURTHER))
    save_cost_table(loaded, path)
    assert load_cost_table(path, "this machine").plain_ms is None


def test_a_table_of_another_machine_is_stale_and_an_even_one_is_flat(tmp_path: Path) -> None:
    path = tmp_path / "cost_table.json"
    save_cost_table(table(), path)
    assert load_cost_table(path, "another machine").state == "stale"
    save_cost_table(table(cost_ms=[[5, 5], [6, 6], [8, 8]]), path)
    assert load_cost_table(path, "this machine").state == "flat"


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "7",
        "{}",
        "\x00\x01",
        json.dumps(GOOD)[:-20],
        json.dumps(GOOD | {"cost_ms": [[5.0, float("nan")], [6, 8], [8, 12]]}),
        json.dumps(GOOD | {"cost_ms": [[5.0, -5.5], [6, 8], [8, 12]]}),
        json.dumps(GOOD | {"cost_ms": [[5.0], [6, 8], [8, 12]]}),
        json.dumps(GOOD | {"cost_ms": [["a", "b"], [6, 8], [8, 12]]}),
        json.dumps(GOOD | {"cost_ms": {"1": 5.0}}),
        json.dumps(GOOD | {"batches": 8}),
        json.dumps(GOOD | {"batches": [1, 4, float("inf")]}),
        json.dumps(GOOD | {"ratios": [None, 1.0]}),
        json.dumps(GOOD | {"cost_ms": [[5.0, None], [6, 8], [8, 12]]}),
        json.dumps(GOOD | {"context_ms": 3.0}),
        json.dumps(GOOD | {"context_ms": {"plain": 1.0}}),
        json.dumps(GOOD | {"depths": [1, 7]}),
        json.dumps(GOOD | {"switch_ms": "fast"}),
        *(json.dumps(without(name)) for name in GOOD),
    ],
)
def test_a_file_that_is_no_cost_table_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost_table.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CostTableError, match=r"cost_table\.json"):
        load_cost_table(path, "this machine")


def test_a_missing_file_and_a_directory_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CostTableError, match=r"absent\.json"):
        load_cost_table(tmp_path / "absent.json", "this machine")
    with pytest.raises(CostTableError, match=tmp_path.name):
        load_cost_table(tmp_path, "this machine")


def test_bytes_that_are_no_text_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "cost_table.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CostTableError, match=r"cost_table\.json"):
        load_cost_table(path, "this machine")
