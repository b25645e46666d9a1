"""Every row of the fault list has its test: the row's id stands in the test's name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = {"s": 17, "r": 11, "e": 6, "o": 4}


def names_of_tests(folder: str) -> list[str]:
    return [
        node.name
        for path in sorted((TESTS / folder).glob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def ids_in(name: str) -> list[str]:
    """s11 and s12 of test_s11_s12_real_model..."""
    return re.findall(r"[sreo]\d+", re.match(r"test((_[sreo]\d+)*)", name)[1])


@pytest.mark.parametrize("group", ROWS)
def test_every_row_has_a_test_of_its_name(group: str) -> None:
    # Rows about plans are tested where plans are compiled: NVIDIA's compiler has crashed in a process that had loaded
    # the other runtimes before, so tests/tensorrt has a process of its own.
    folders = ("acceptance", "tensorrt") if group == "e" else ("acceptance",)
    found = {row for folder in folders for name in names_of_tests(folder) for row in ids_in(name)}
    rows = {f"{group}{number}" for number in range(1, ROWS[group] + 1)}
    assert rows - found == set(), "rows without a test"
    assert {row for row in found if row.startswith(group)} - rows == set(), "ids of no row"
