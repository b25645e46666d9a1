"""The JSON files that a page is made of, checked before anything is drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcut_server.bench.confidence import Reliability
from dcut_server.report_page.fields import REQUIRED, Fields, InvalidReport

BENCH, SIMULATION = "dcut-trt bench", "dcut-trt simulation"
SCHEMAS = {BENCH: (1, 2), SIMULATION: (1,)}


@dataclass(frozen=True, slots=True)
class Confidence:
    """drafted, kept, accepted: by depth 1..D.  before, after: what the policy made of the prefix product."""

    drafted: tuple[int, ...]
    kept: tuple[int, ...]
    accepted: tuple[int, ...]
    before: Reliability | None
    after: Reliability | None


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a policy can be compared in. device: "" where the file names none; target likewise."""

    dataset: str
    device: str
    target: str
    temperature: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one concurrency. rounds: tokens per second of each.  select_share: of the step's time.

    differing: output tokens that differ from plain decoding, and all that were compared.
    """

    scenario: Scenario
    policy: str
    concurrency: int
    tokens_per_s: float
    tau: float
    keep_ratio: float
    rounds: tuple[float, ...] = ()
    select_share: float | None = None
    differing: tuple[int, int] | None = None
    confidence: Confidence | None = None


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds of a step. cost_ms: [batches][ratios].  plain_ms: [batches], None where it was not measured."""

    name: str
    batches: tuple[int, ...]
    ratios: tuple[float, ...]
    cost_ms: tuple[tuple[float, ...], ...]
    plain_ms: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Published:
    """Speed over dflash as a paper reports it, and as it was simulated."""

    device: str
    dataset: str
    concurrency: int
    policy: str
    published: float
    simulated: float


@dataclass(frozen=True, slots=True)
class Document:
    """One file. facts: name and value, in reading order.  raw: all of it."""

    path: Path
    kind: str
    title: str
    facts: tuple[tuple[str, str], ...]
    cells: tuple[Cell, ...]
    costs: tuple[Costs, ...]
    published: tuple[Published, ...]
    raw: dict[str, Any]


def read_document(path: Path) -> Document:
    """Raises InvalidReport naming file, field and what belongs there."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidReport(f"{path}: cannot be read as JSON: {error}") from error
    fields = Fields(path, "", raw)
    kind = fields.text("kind")
    if kind not in SCHEMAS:
        raise fields.wrong("kind", f"must be one of {', '.join(SCHEMAS)}")
    if fields.whole("schema") not in SCHEMAS[kind]:
        raise fields.wrong("schema", f"must be one of {', '.join(map(str, SCHEMAS[kind]))}; another version wrote it")
    common = _bench_scenario(fields) if kind == BENCH else Scenario("", "", "", 0.0)
    published = tuple(_published(each) for each in fields.items("table2", ()))
    cells = tuple(_cell(each, common, kind) for each in fields.items("cells", () if published else REQUIRED))
    if not cells and not published:
        raise fields.wrong("cells", "must hold at least one")
    _check_unique(path, cells)
    costs = tuple(_costs(name, each) for name, each in _cost_fields(fields, kind))
    return Document(path, kind, _title(fields, kind, cells), _facts(fields), cells, costs, published, raw)


def _published(fields: Fields) -> Published:
    return Published(
        fields.text("device"),
        fields.text("dataset"),
        fields.whole("concurrency", least=1),
        fields.text("method"),
        fields.positive("published"),
        fields.positive("simulated"),
    )


def _bench_scenario(fields: Fields) -> Scenario:
    bundle, options = fields.inner("bundle"), fields.inner("options")
    target = f"{bundle.text('target')} {bundle.text('precision')}"
    return Scenario(fields.inner("dataset").text("name"), "", target, options.number("temperature", 0.0))


def _cell(fields: Fields, common: Scenario, kind: str) -> Cell:
    temperature = fields.number("temperature", common.temperature)
    scenario = Scenario(common.dataset, common.device, common.target, temperature)
    if kind == SIMULATION:
        scenario = Scenario(fields.text("dataset"), fields.text("device"), fields.text("target", ""), temperature)
    times, difference = fields.optional("step_ms"), fields.optional("difference")
    step_ms = times.number("step") if times else 0.0
    return Cell(
        scenario=scenario,
        policy=fields.text("policy"),
        concurrency=fields.whole("concurrency", least=1),
        tokens_per_s=fields.positive("tokens_per_s"),
        tau=fields.number("tau"),
        keep_ratio=fields.number("keep_ratio", most=1.0),
        rounds=fields.numbers("tokens_per_s_rounds", ()),
        select_share=times.number("select") / step_ms if times and step_ms else None,
        differing=(difference.whole("tokens"), difference.whole("compared")) if difference else None,
        confidence=_confidence(found) if (found := fields.optional("confidence")) else None,
    )


def _confidence(fields: Fields) -> Confidence:
    drafted = fields.wholes("drafted")
    kept, accepted = (fields.wholes(name, length=len(drafted)) for name in ("kept", "accepted"))
    before, after = (fields.optional(name) for name in ("prefix_product", "score"))
    return Confidence(
        drafted, kept, accepted, _reliability(before) if before else None, _reliability(after) if after else None
    )


def _reliability(fields: Fields) -> Reliability:
    count = fields.wholes("count")
    predicted, accepted = (fields.gaps(name, count) for name in ("predicted", "accepted"))
    auroc = None if fields.raw.get("auroc") is None else fields.number("auroc", most=1.0)
    return Reliability(predicted, accepted, count, fields.number("ece", most=1.0), auroc)


def _cost_fields(fields: Fields, kind: str) -> list[tuple[str, Fields]]:
    if kind == BENCH:
        found = fields.optional("cost_table")
        return [("", found)] if found else []
    tables = fields.optional("cost_tables")
    return [(name, tables.inner(name)) for name in tables.raw] if tables else []


def _costs(name: str, fields: Fields) -> Costs:
    batches, ratios = fields.wholes("batches"), fields.numbers("ratios")
    if not ratios:
        raise fields.wrong("ratios", "must hold at least one")
    rows = fields.rows("cost_ms", len(batches), len(ratios))
    plain = None if fields.raw.get("plain_ms") is None else fields.numbers("plain_ms", length=len(batches))
    return Costs(name, batches, ratios, rows, plain)


def _check_unique(path: Path, cells: Sequence[Cell]) -> None:
    seen: set[tuple[Scenario, str, int]] = set()
    for index, cell in enumerate(cells):
        key = (cell.scenario, cell.policy, cell.concurrency)
        if key in seen:
            raise InvalidReport(
                f"{path}: cells[{index}]: {cell.policy} at concurrency {cell.concurrency} is there twice"
            )
        seen.add(key)


def _title(fields: Fields, kind: str, cells: Sequence[Cell]) -> str:
    if kind == SIMULATION:
        scenarios = [cell.scenario for cell in cells]
        named = (", ".join(dict.fromkeys(getattr(each, name) for each in scenarios)) for name in ("dataset", "device"))
        return f"Simulation: {' on '.join(named)}" if cells else "Simulation of published results"
    bundle = fields.inner("bundle")
    return f"{bundle.text('target')}, {bundle.text('precision')}, on {fields.inner('dataset').text('name')}"


def _facts(fields: Fields) -> tuple[tuple[str, str], ...]:
    facts = [("file", fields.path.name), ("started", fields.text("started_at", ""))]
    facts.append(("command", " ".join(fields.texts("command", ()))))
    machine, bundle, dataset = (fields.optional(name) for name in ("machine", "bundle", "dataset"))
    if machine:
        facts += [(name.replace("_", " "), _shown(value)) for name, value in machine.raw.items()]
    versions = fields.optional("versions")
    if versions:
        facts.append(("versions", ", ".join(f"{name} {_shown(value)}" for name, value in versions.raw.items())))
    if bundle:
        shown = ("backend", "precision", "target", "drafter", "draft_length", "max_batch", "max_len")
        facts += [(name.replace("_", " "), _shown(bundle.raw[name])) for name in shown if name in bundle.raw]
    if dataset:
        facts += [("dataset", ", ".join(dataset.text(name, "") for name in ("name", "source", "license")))]
    facts.append(("notes", fields.text("notes", "")))
    return tuple((name, value) for name, value in facts if value)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
