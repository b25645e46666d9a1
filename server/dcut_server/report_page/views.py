"""What stands on the page: tables, charts and legends out of the documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from dcut_server.bench.summary import DFLASH, PLAIN
from dcut_server.report_page.charts import Chart, Series, over_concurrency, published_chart
from dcut_server.report_page.documents import Cell, Costs, Document, Published, Scenario
from dcut_server.report_page.drafts import DraftsView, drafts_view, recalibrates
from dcut_server.report_page.styles import COLOURS, KNOWN, Style, styles


def is_oracle(policy: str) -> bool:
    """Knows what will be accepted: a ceiling, and no competitor."""
    return policy == "oracle" or policy.startswith("oracle-")


@dataclass(frozen=True, slots=True)
class MeanRow:
    """Geometric means of a policy's tokens per second over the cells of a file, relative to others in the same cell."""

    policy: str
    style: Style
    cells: int
    over_plain: float | None
    over_dflash: float | None
    of_best: float
    differing: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """share: 0 to 1, how much of the cell a bar fills, None without one.  best: the highest of its column."""

    text: str
    share: float | None = None
    best: bool = False


@dataclass(frozen=True, slots=True)
class Matrix:
    """One number of every policy (rows) at every concurrency (columns), None where there is none; no empty rows."""

    title: str
    columns: tuple[int, ...]
    rows: tuple[tuple[str, Style, tuple[MatrixCell | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class HeatCell:
    text: str
    share: float


@dataclass(frozen=True, slots=True)
class Heat:
    """A cost table. head: of the columns.  rows: batch size and cells."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[int, tuple[HeatCell, ...]], ...]


@dataclass(frozen=True, slots=True)
class ScenarioView:
    title: str
    legend: tuple[tuple[str, Style], ...]
    charts: tuple[Chart, ...]
    matrices: tuple[Matrix, ...]
    drafts: DraftsView | None


@dataclass(frozen=True, slots=True)
class PublishedView:
    """Simulated beside published speeds. rows: device, dataset, live requests, policy, both, and how far off."""

    chart: Chart
    legend: tuple[tuple[str, Style], ...]
    said: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class DocumentView:
    document: Document
    means: tuple[MeanRow, ...]
    scenarios: tuple[ScenarioView, ...]
    heats: tuple[Heat, ...]
    published: PublishedView | None


def document_view(document: Document) -> DocumentView:
    policies = tuple(dict.fromkeys(cell.policy for cell in document.cells))
    drawn = styles(policies)
    scenarios = dict.fromkeys(cell.scenario for cell in document.cells)
    return DocumentView(
        document,
        tuple(_mean_row(policy, drawn[policy], document.cells) for policy in policies),
        tuple(_scenario_view(scenario, document.cells, drawn) for scenario in scenarios),
        tuple(_heat(costs) for costs in document.costs),
        _published_view(document.published) if document.published else None,
    )


def best_rates(cells: Sequence[Cell]) -> dict[tuple[Scenario, int], float]:
    """The highest tokens per second by scenario and concurrency; oracles count only where they are alone."""
    best: dict[tuple[Scenario, int], float] = {}
    for cell in sorted(cells, key=lambda cell: (is_oracle(cell.policy), -cell.tokens_per_s)):
        best.setdefault((cell.scenario, cell.concurrency), cell.tokens_per_s)
    return best


def _mean_row(policy: str, style: Style, cells: Sequence[Cell]) -> MeanRow:
    own = [cell for cell in cells if cell.policy == policy]
    best = best_rates(cells)
    differing = [cell.differing for cell in own if cell.differing is not None]
    return MeanRow(
        policy,
        style,
        len(own),
        _mean_over(own, _rates(cells, PLAIN)),
        _mean_over(own, _rates(cells, DFLASH)),
        geometric_mean(cell.tokens_per_s / best[cell.scenario, cell.concurrency] for cell in own),
        (sum(tokens for tokens, _ in differing), sum(compared for _, compared in differing)) if differing else None,
    )


def _rates(cells: Sequence[Cell], policy: str) -> dict[tuple[Scenario, int], float]:
    return {(cell.scenario, cell.concurrency): cell.tokens_per_s for cell in cells if cell.policy == policy}


def _mean_over(own: Sequence[Cell], base: dict[tuple[Scenario, int], float]) -> float | None:
    """None unless the base was measured beside every one of these cells."""
    if any((cell.scenario, cell.concurrency) not in base for cell in own):
        return None
    return geometric_mean(cell.tokens_per_s / base[cell.scenario, cell.concurrency] for cell in own)


def _scenario_view(scenario: Scenario, all_cells: Sequence[Cell], drawn: dict[str, Style]) -> ScenarioView:
    cells = [cell for cell in all_cells if cell.scenario == scenario]
    policies = tuple(dict.fromkeys(cell.policy for cell in cells))
    named = (scenario.target, scenario.dataset, scenario.device, f"temperature {scenario.temperature:g}")
    return ScenarioView(
        title=", ".join(part for part in named if part),
        legend=tuple((policy, drawn[policy]) for policy in policies),
        charts=_charts(cells, policies, drawn),
        matrices=_matrices(cells, policies, drawn),
        drafts=drafts_view(cells, policies),
    )


def _charts(cells: Sequence[Cell], policies: Sequence[str], drawn: dict[str, Style]) -> tuple[Chart, ...]:
    """Throughput, and how it compares with plain, or else dflash. None for a single concurrency: the table says all."""
    if len({cell.concurrency for cell in cells}) == 1:
        return ()
    ordered = sorted(cells, key=lambda cell: cell.concurrency)
    rates = [
        Series(policy, drawn[policy], tuple(_point(cell, 1.0) for cell in ordered if cell.policy == policy))
        for policy in policies
    ]
    charts = [over_concurrency("Throughput", "output tokens per second", rates)]
    for base in (PLAIN, DFLASH):
        base_rates = _rates(cells, base)
        if len(policies) == 1 or any((cell.scenario, cell.concurrency) not in base_rates for cell in cells):
            continue
        relative = []
        for policy in policies:
            own = [cell for cell in ordered if cell.policy == policy]
            points = tuple(_point(cell, base_rates[cell.scenario, cell.concurrency]) for cell in own)
            relative.append(Series(policy, drawn[policy], points, f"{{:.2f}} x {base}"))
        charts.append(over_concurrency(f"Speed over {base}", f"tokens/s over {base}", relative, base=True))
        break
    return tuple(charts)


def _point(cell: Cell, base: float) -> tuple[float, float, float, float]:
    """A band would mix the noise of two policies where the base is not 1."""
    rate = cell.tokens_per_s / base
    rounds = cell.rounds if base == 1.0 and cell.rounds else (rate,)
    return cell.concurrency, rate, min(rate, *rounds), max(rate, *rounds)


def _matrices(cells: Sequence[Cell], policies: Sequence[str], drawn: dict[str, Style]) -> tuple[Matrix, ...]:
    best = best_rates(cells)

    def rate(cell: Cell) -> MatrixCell:
        of_best = cell.tokens_per_s / best[cell.scenario, cell.concurrency]
        return MatrixCell(f"{cell.tokens_per_s:.1f}", best=of_best == 1)

    def of_best(cell: Cell) -> MatrixCell:
        share = cell.tokens_per_s / best[cell.scenario, cell.concurrency]
        return MatrixCell(f"{share:.1%}", min(share, 1.0), best=share == 1)

    def select(cell: Cell) -> MatrixCell | None:
        return None if cell.select_share is None else MatrixCell(f"{cell.select_share:.1%}")

    fields: dict[str, Callable[[Cell], MatrixCell | None]] = {
        "Throughput, output tokens per second": rate,
        "Of best: throughput over the fastest policy's": of_best,
        "Tau: tokens per request and decoding step": lambda cell: MatrixCell(f"{cell.tau:.2f}"),
        "Keep: rows verified of all B * (D + 1)": lambda cell: MatrixCell(f"{cell.keep_ratio:.1%}", cell.keep_ratio),
        "ECE: calibration error of the prefix product": lambda cell: _foresight(cell, "ece", own=False),
        "AUROC of the prefix product": lambda cell: _foresight(cell, "auroc", own=False),
        "ECE: calibration error of the policy's own score": lambda cell: _foresight(cell, "ece", own=True),
        "AUROC of the policy's own score": lambda cell: _foresight(cell, "auroc", own=True),
        "Selecting and learning, share of the step's time": select,
    }
    matrices = (_matrix(title, shown, cells, policies, drawn) for title, shown in fields.items())
    return tuple(matrix for matrix in matrices if matrix.rows)


def _matrix(
    title: str,
    shown: Callable[[Cell], MatrixCell | None],
    cells: Sequence[Cell],
    policies: Sequence[str],
    drawn: dict[str, Style],
) -> Matrix:
    columns = tuple(sorted({cell.concurrency for cell in cells}))
    found = {(cell.policy, cell.concurrency): shown(cell) for cell in cells}
    rows = ((policy, drawn[policy], tuple(found.get((policy, live)) for live in columns)) for policy in policies)
    return Matrix(title, columns, tuple(row for row in rows if any(row[2])))


def _foresight(cell: Cell, name: str, *, own: bool) -> MatrixCell | None:
    """Of the prefix product, or of the policy's own score where that is another."""
    confidence = cell.confidence
    if confidence is None or (own and not recalibrates(confidence)):
        return None
    found = confidence.after if own else confidence.before
    value = None if found is None else getattr(found, name)
    return None if value is None else MatrixCell(f"{value:.3f}")


def _published_view(cells: Sequence[Published]) -> PublishedView:
    # Points have no dashes: every policy needs a colour of its own.
    policies = dict.fromkeys(cell.policy for cell in cells)
    drawn = {name: KNOWN.get(name, Style(COLOURS[place % len(COLOURS)])) for place, name in enumerate(policies)}
    errors = [cell.simulated / cell.published - 1 for cell in cells]
    within = [sum(abs(error) <= limit for error in errors) for limit in (0.05, 0.1)]
    rows = (
        (
            cell.device,
            cell.dataset,
            f"{cell.concurrency}",
            cell.policy,
            f"{cell.published:.3f}",
            f"{cell.simulated:.3f}",
            f"{error:+.1%}",
        )
        for cell, error in zip(cells, errors, strict=True)
    )
    said = f"{within[0]} of {len(cells)} within 5%, {within[1]} within 10%, "
    said += f"{median(map(abs, errors)):.1%} off at the median."
    return PublishedView(published_chart(cells, drawn), tuple(drawn.items()), said, tuple(rows))


def _heat(costs: Costs) -> Heat:
    """Shades follow the logarithm of the cost, so that the small batches differ as well."""
    plain = costs.plain_ms or ()
    head = (*(("plain",) if plain else ()), *(f"{ratio:.4g}" for ratio in costs.ratios))
    rows = [((plain[place],) if plain else ()) + row for place, row in enumerate(costs.cost_ms)]
    low, high = (math.log(pick(pick(row) for row in rows)) for pick in (min, max))
    return Heat(
        costs.name,
        head,
        tuple(
            (
                batch,
                tuple(
                    HeatCell(
                        f"{cost:.2f}" if cost < 100 else f"{cost:.0f}", (math.log(cost) - low) / (high - low or 1.0)
                    )
                    for cost in row
                ),
            )
            for batch, row in zip(costs.batches, rows, strict=True)
        ),
    )
