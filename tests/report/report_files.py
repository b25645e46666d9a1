"""Documents as `dcut-trt bench` and a simulation write them, and a page taken apart again."""

from __future__ import annotations

import json
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from dcut_server.bench import report
from dcut_server.bench.datasets import Prompt
from dcut_server.bench.options import BenchOptions
from dcut_server.bench.runner import chat_requests, measure
from dcut_server.bench.summary import summarise
from dcut_server.report_page.documents import read_document
from dcut_server.report_page.page import render_page
from dcut_trt.backends.scripted import scripted_engine
from dcut_trt.spec.cost_table import CostTable

TABLE = CostTable((1, 8), (0.5, 1.0), np.array([[1.0, 1.5], [2.0, 4.0]]), np.array([0.9, 1.5]), "test", "now")
POLICIES = ("plain", "dflash", "ratio:0.25", "ratio:0.5", "dcut", "auto")
FACTS = (("made", "today"),)
VOID = {"meta", "link", "br", "img", "input", "hr", "path", "circle", "rect"}


@cache
def _measured() -> str:
    options = BenchOptions(POLICIES, (1, 3), requests=4, rounds=1, max_tokens=12, temperatures=(0.0, 0.8))
    engine = scripted_engine(prefix_cache=False)
    engine.cost_table = TABLE
    requests = chat_requests([Prompt(f"p{at}", f"prompt {at}") for at in range(5)], engine.tokenizer, options)
    facts = {
        "started_at": "2026-11-30T04:02:34+00:00",
        "command": ["dcut-trt", "bench", "bundles/some"],
        "machine": {"fingerprint": "a machine of tests", "cpus": 2, "load_average": [0.5, 1.25]},
        "versions": {"python": "3.11"},
        "bundle": {"target": "a-target", "precision": "fp32", "backend": "scripted"},
        "dataset": {"name": "some-prompts", "source": "made here", "license": "none"},
        "options": {},
        "cost_table": {
            "batches": list(TABLE.batches),
            "ratios": list(TABLE.ratios),
            "cost_ms": TABLE.cost_ms.tolist(),
            "plain_ms": [0.9, 1.5],
        },
    }
    return json.dumps(report.report_document(facts, summarise(measure(engine, requests, options))))


def bench_document() -> dict[str, Any]:
    """A fresh copy of a benchmark of the scripted engine."""
    return json.loads(_measured())  # type: ignore[no-any-return]


def simulation_document() -> dict[str, Any]:
    rates = {"dflash": 2.0, "dcut": 3.0, "oracle": 4.0}
    cells = [
        {"policy": policy, "concurrency": live, "dataset": dataset, "device": device, "tokens_per_s": rate * live}
        | {"tau": rate, "keep_ratio": 0.5}
        for device in ("h20", "h800")
        for dataset in ("gsm8k", "math500")
        for live in (16, 64)
        for policy, rate in rates.items()
    ]
    published = {"device": "h20", "dataset": "gsm8k", "concurrency": 16, "published": 1.25, "simulated": 1.3}
    return {
        "schema": 1,
        "kind": "dcut-trt simulation",
        "cells": cells,
        "cost_tables": {"h20": {"batches": [16], "ratios": [1.0], "cost_ms": [[51.75]], "plain_ms": None}},
        "table2": [published | {"method": "dcut"}],
    }


def written(document: object, path: Path) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return path


def page_of(tmp_path: Path, *documents: dict[str, Any]) -> str:
    files = [written(document, tmp_path / f"{at}.json") for at, document in enumerate(documents)]
    return render_page([read_document(path) for path in files], FACTS)


class Page(HTMLParser):
    """A parsed page. elements: every start tag with its attributes.  text: all that a reader sees.

    data: the embedded documents by file name.  scripts: what the browser runs.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.seen: list[str] = []
        self.data: dict[str, Any] = {}
        self.scripts: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.seen).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID or (tag in ("circle", "rect") and self.get_starttag_text()[-2:] != "/>"):
            self._open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self._open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data: str) -> None:
        inside, attributes = self._open[-1] if self._open else ("", {})
        if inside == "script" and attributes.get("type") == "application/json":
            self.data[str(attributes["data-file"])] = json.loads(data)
        elif inside == "script":
            self.scripts.append(data)
        elif inside != "style":
            self.seen.append(data)
