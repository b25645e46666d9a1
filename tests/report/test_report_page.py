"""The page holds what the files say, needs nothing else, and refuses what it cannot draw."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_files import FACTS, Page, bench_document, page_of, simulation_document, written

from dcut_server.cli import main
from dcut_server.report_page.documents import read_document
from dcut_server.report_page.fields import InvalidReport
from dcut_server.report_page.page import render_page

ODD = [None, True, -1, 0, 3, 10**400, 0.5, 1e300, 1e-300, "", "text", [], [0], [0.5, None], {}, {"a": 1}]
SHIPPED = Path(__file__).parents[2] / "docs" / "benchmarks" / "gsm8k.json"


def test_every_policy_and_number_is_on_the_page(tmp_path):
    bench, simulation = bench_document(), simulation_document()
    page = Page(page_of(tmp_path, bench, simulation))
    assert page.data == {"0.json": bench, "1.json": simulation}
    for document in (bench, simulation):
        for cell in document["cells"]:
            assert cell["policy"] in page.text
            for shown in (f"{cell['tokens_per_s']:.1f}", f"{cell['tau']:.2f}", f"{cell['keep_ratio']:.1%}"):
                assert f" {shown} " in page.text, (cell["policy"], shown)
            if cell.get("confidence") and cell["confidence"]["prefix_product"]:
                assert f" {cell['confidence']['prefix_product']['ece']:.3f} " in page.text
    for mean in bench["means"]:
        assert f" {mean['over_plain']:.3f} " in page.text
        assert f" {mean['of_best']:.1%} " in page.text
    for fact in (
        "a machine of tests",
        "0.5, 1.25",
        "python 3.11",
        "dcut-trt bench bundles/some",
        "2026-11-30",
        "today",
    ):
        assert fact in page.text
    for cost in ("0.90", "1.50", "4.00", "51.75", "1.250", "1.300", "+4.0%"):
        assert f" {cost} " in page.text


def test_every_point_and_every_bar_is_drawn(tmp_path):
    document = simulation_document()
    points = 2 * len(document["cells"]) + len(document["table2"])  # throughput, and speed over dflash
    assert Page(page_of(tmp_path, document)).count("circle") == points

    document, deepest = bench_document(), {}
    for cell in document["cells"]:
        if cell["confidence"]:
            key = cell["temperature"], cell["policy"]
            deepest[key] = max(deepest.get(key, 0), len(cell["confidence"]["drafted"]))
    page = Page(page_of(tmp_path, document))
    assert len(deepest) >= 2 * len(("dflash", "ratio:0.25", "ratio:0.5", "dcut"))
    for kind in ("drafted", "kept", "accepted"):
        bars = [attributes for tag, attributes in page.elements if tag == "rect" and attributes["class"] == kind]
        assert len(bars) == sum(deepest.values())


def test_the_page_needs_nothing_from_anywhere(tmp_path):
    html = page_of(tmp_path, bench_document(), simulation_document())
    page = Page(html)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", html)
    assert len(page.scripts) == 1


def test_nothing_in_a_file_becomes_markup(tmp_path):
    document = bench_document()
    nasty = "</script><script>alert(1)</script><b>&amp;'\""
    document["dataset"]["name"] = document["command"][0] = document["machine"]["fingerprint"] = nasty
    plain = Page(page_of(tmp_path, bench_document()))
    page = Page(page_of(tmp_path, document))
    assert page.data["0.json"] == document
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert "alert(1)" in page.text
    assert "alert" not in page.scripts[0]


def test_the_oracle_is_a_ceiling_and_no_rival(tmp_path):
    text = Page(page_of(tmp_path, simulation_document())).text
    means = text[text.index("Geometric means") : text.index("Of best: tokens")]
    found = re.findall(r"(dflash|dcut|oracle) . ([0-9.]+) ([0-9.]+%) 8", means)
    assert found == [("dflash", "1.000", "66.7%"), ("dcut", "1.500", "100.0%"), ("oracle", "2.000", "133.3%")]


def test_reports_of_the_first_schema_are_drawn_as_well(tmp_path):
    document = bench_document()
    del document["means"]
    document |= {"schema": 1, "options": {"temperature": 0.8}}
    document["cells"] = [cell for cell in document["cells"] if cell["temperature"] == 0.8]
    for cell in document["cells"]:
        del cell["temperature"], cell["of_best"], cell["confidence"]
    page = Page(page_of(tmp_path, document))
    assert "a-target fp32, some-prompts, temperature 0.8" in page.text
    assert "Predicted against observed" not in page.text


def test_the_shipped_measurement_is_drawn():
    document = read_document(SHIPPED)
    page = Page(render_page([document], FACTS))
    assert page.data == {SHIPPED.name: document.raw}


def test_a_single_concurrency_is_a_table_without_lines(tmp_path):
    document = simulation_document()
    document["cells"] = [cell for cell in document["cells"] if cell["concurrency"] == 16]
    del document["table2"]
    page = Page(page_of(tmp_path, document))
    assert page.count("circle") == 0
    assert " 48.0 " in page.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: "not JSON {", "cannot be read as JSON"),
        (lambda d: "[" * 100_000, "cannot be read as JSON"),
        (lambda d: [], "the file: must be a JSON object"),
        (lambda d: {"cells": []}, "kind: is missing"),
        (lambda d: d | {"kind": "a soak"}, "kind='a soak': must be one of dcut-trt bench, dcut-trt simulation"),
        (lambda d: d | {"schema": 9}, "schema=9: must be one of 1, 2; another version wrote it"),
        (lambda d: d | {"cells": []}, r"cells=\[\]: must hold at least one"),
        (lambda d: d | {"cells": {}}, "cells={}: must be a list"),
        (lambda d: d | {"cells": [3]}, r"cells\[0\]: must be a JSON object"),
        (
            lambda d: d | {"cells": [*d["cells"], d["cells"][2]]},
            r"cells\[24\]: ratio:0.25 at concurrency 1 is there twice",
        ),
        (lambda d: d | {"bundle": {"target": 3}}, "bundle.target=3: must be a string"),
        (lambda d: d | {"command": [3]}, r"command=\[3\]: must be a list of strings"),
        (lambda d: d | {"started_at": 5}, "started_at=5: must be a string"),
        (lambda d: first(d, "tokens_per_s", "fast"), r"cells\[0\].tokens_per_s='fast': must be a number"),
        (lambda d: first(d, "tokens_per_s", 0.0), r"cells\[0\].tokens_per_s=0.0: must be above 0"),
        (lambda d: first(d, "tau", float("nan")), r"cells\[0\].tau=nan: must be a number"),
        (lambda d: first(d, "tau", 10**400), r"cells\[0\].tau=1000*.*: must be a number"),
        (lambda d: first(d, "tau", True), r"cells\[0\].tau=True: must be a number"),
        (lambda d: first(d, "keep_ratio", 1.5), r"cells\[0\].keep_ratio=1.5: .* at most 1"),
        (lambda d: first(d, "concurrency", 0), r"cells\[0\].concurrency=0: must be an integer of at least 1"),
        (lambda d: first(d, "confidence", [1]), r"cells\[0\].confidence: must be a JSON object"),
        (lambda d: drafted(d, "kept", [1]), r"cells\[1\].confidence.kept=\[1\]: has 1 values, must have 7"),
        (
            lambda d: costs(d, "cost_ms", [[1.0, 2.0]]),
            "cost_table.cost_ms=.*: must be 2 rows of 2 numbers above 0",
        ),
        (lambda d: costs(d, "plain_ms", [1.0]), "cost_table.plain_ms=.*: has 1 values, must have 2"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_file_and_field(tmp_path, change, said):
    path = written(change(bench_document()), tmp_path / "foreign.json")
    with pytest.raises(InvalidReport, match=f"^{re.escape(str(path))}: {said}"):
        read_document(path)


@given(st.data())
def test_a_damaged_file_is_refused_or_drawn_and_never_breaks(tmp_path_factory, data):
    document = simulation_document()
    document["cells"][0]["confidence"] = next(cell for cell in bench_document()["cells"] if cell["confidence"])[
        "confidence"
    ]
    holder, key = document, data.draw(st.sampled_from(sorted(document)))
    while isinstance(holder[key], list | dict) and holder[key] and data.draw(st.booleans()):
        holder = holder[key]
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    if data.draw(st.booleans()):
        holder[key] = data.draw(st.sampled_from(ODD))
    else:
        del holder[key]
    path = written(document, tmp_path_factory.getbasetemp() / "damaged.json")
    refused = ""
    try:
        html = render_page([read_document(path)], FACTS)
    except InvalidReport as error:
        refused = str(error)
    assert refused.startswith(f"{path}: ") if refused else Page(html).data == {path.name: document}


def test_the_command_writes_the_page_or_says_in_one_line_why_not(tmp_path, capsys):
    path, out = written(bench_document(), tmp_path / "a.json"), tmp_path / "a.html"
    assert main(["report", str(path), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert Page(out.read_text(encoding="utf-8")).data == {"a.json": bench_document()}
    for files, target, said in (
        ([path, tmp_path / "b.json"], out, "b.json: cannot be read as JSON"),
        ([path], path, "must not be one of the files that are read"),
        ([path], tmp_path / "nowhere" / "a.html", "cannot be written: No such file or directory"),
    ):
        assert main(["report", *map(str, files), "--out", str(target)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def first(document, name, value):
    document["cells"][0][name] = value
    return document


def drafted(document, name, value):
    document["cells"][1]["confidence"][name] = value
    return document


def costs(document, name, value):
    document["cost_table"][name] = value
    return document
