"""Where the lines, bars and ticks of a chart go, in the units of its SVG's view box."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dcut_server.bench.confidence import Reliability
from dcut_server.report_page.documents import Confidence, Published
from dcut_server.report_page.styles import Style

WIDTH, HEIGHT = 440, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 428, 12, 214  # of the plot within that
SQUARE = 300
MOST_TICKS = 6

Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a line. said: what a reader sees who points at it."""

    x: float
    y: float
    said: str
    radius: float = 3.0


@dataclass(frozen=True, slots=True)
class Line:
    """path, band: of an SVG's d. band: from the lowest to the highest round, "" without rounds."""

    name: str
    style: Style
    marks: tuple[Mark, ...]
    path: str
    band: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over two axes. level: where a line across the plot stands for "as fast as the base", None without one."""

    title: str
    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    level: float | None = None
    width: int = WIDTH
    height: int = HEIGHT
    box: tuple[int, int, int, int] = (LEFT, TOP, RIGHT, BOTTOM)


@dataclass(frozen=True, slots=True)
class Series:
    """points: x, y, and the lowest and highest of its rounds. shown: y as a reader sees it."""

    name: str
    style: Style
    points: tuple[tuple[float, float, float, float], ...]
    shown: str = "{:.1f}"


@dataclass(frozen=True, slots=True)
class Bar:
    """A depth of a block: heights in shares of the blocks drafted."""

    x: float
    width: float
    depth: int
    drafted: Mark
    kept: Mark
    accepted: Mark


def over_concurrency(title: str, y_label: str, series: Sequence[Series], *, base: bool = False) -> Chart:
    """Lines over live requests, on a base-2 logarithmic axis. base: whether y is relative, so that 1 is a level."""
    places = sorted({x for each in series for x, *_ in each.points})
    highest = max(high for each in series for *_, high in each.points)
    lowest = min(low for each in series for *_, low, _ in each.points)
    ticks = nice_ticks(min(lowest, 1.0) if base else 0.0, max(highest, 1.0) if base else highest)
    x_at = _along(math.log2(places[0]), math.log2(places[-1]), LEFT + 12, RIGHT - 12)
    y_at = _along(ticks[0], ticks[-1], BOTTOM, TOP)
    return Chart(
        title,
        "live requests",
        y_label,
        tuple(Tick(x_at(math.log2(x)), f"{x:g}") for x in places),
        tuple(Tick(y_at(value), f"{value:,.10g}") for value in ticks),
        tuple(_line(each, lambda x: x_at(math.log2(x)), y_at) for each in series),
        y_at(1.0) if base else None,
    )


def reliability_chart(title: str, curves: Sequence[tuple[str, Style, Reliability]]) -> Chart:
    """Observed over predicted probability; a point's area follows the share of positions in its bin."""
    frame, x_at, y_at = _square(title, "predicted probability of acceptance", "accepted share", 0.0, 1.0, "{:.0%}")
    lines = []
    for name, style, curve in curves:
        total = sum(curve.count)
        marks = tuple(
            Mark(
                x_at(said),
                y_at(seen),
                f"{name}: predicted {said:.1%}, accepted {seen:.1%} of {count} positions",
                1.5 + 7 * math.sqrt(count / total),
            )
            for said, seen, count in zip(curve.predicted, curve.accepted, curve.count, strict=True)
            if said is not None and seen is not None
        )
        lines.append(Line(name, style, marks, _path([(mark.x, mark.y) for mark in marks])))
    return replace(frame, lines=tuple(lines))


def published_chart(cells: Sequence[Published], drawn: dict[str, Style]) -> Chart:
    """Simulated over published speed; on the diagonal they agree. Both axes have the same scale."""
    values = [value for cell in cells for value in (cell.published, cell.simulated)]
    title = "Speed over dflash, simulated against published"
    frame, x_at, y_at = _square(title, "published", "simulated", min(values), max(values), "{:g}")
    lines = []
    for policy in dict.fromkeys(cell.policy for cell in cells):
        marks = tuple(
            Mark(
                x_at(cell.published),
                y_at(cell.simulated),
                f"{policy}, {cell.device}, {cell.dataset}, {cell.concurrency} live: published {cell.published:.3f}, "
                f"simulated {cell.simulated:.3f}",
            )
            for cell in cells
            if cell.policy == policy
        )
        lines.append(Line(policy, drawn[policy], marks, ""))
    return replace(frame, lines=tuple(lines))


def depth_bars(confidence: Confidence, width: float, height: float) -> tuple[Bar, ...]:
    """Bars from left to right in a plot of this size, whose y grows downwards. Heights are relative to depth 1."""
    blocks = max(confidence.drafted[0], 1)
    pitch = width / len(confidence.drafted)

    def mark(count: int, what: str, depth: int) -> Mark:
        return Mark(
            0, height * (1 - count / blocks), f"depth {depth}: {count:,} {what}, {count / blocks:.1%} of blocks"
        )

    return tuple(
        Bar(
            place * pitch + 0.12 * pitch,
            0.76 * pitch,
            place + 1,
            mark(drafted, "drafted", place + 1),
            mark(kept, "kept", place + 1),
            mark(accepted, "accepted", place + 1),
        )
        for place, (drafted, kept, accepted) in enumerate(
            zip(confidence.drafted, confidence.kept, confidence.accepted, strict=True)
        )
    )


def _square(title: str, x_label: str, y_label: str, low: float, high: float, shown: str) -> tuple[Chart, Scale, Scale]:
    """A chart without lines whose axes have one scale, so that a diagonal says equal; and where x and y go in it."""
    left, top, right, bottom = box = (58, 12, SQUARE - 20, SQUARE - 54)
    ticks = nice_ticks(low, high)
    x_at, y_at = _along(ticks[0], ticks[-1], left, right), _along(ticks[0], ticks[-1], bottom, top)
    x_ticks, y_ticks = (tuple(Tick(at(value), shown.format(value)) for value in ticks) for at in (x_at, y_at))
    return Chart(title, x_label, y_label, x_ticks, y_ticks, (), None, SQUARE, SQUARE, box), x_at, y_at


def nice_ticks(low: float, high: float) -> list[float]:
    """Round values, at least two and evenly apart, that enclose low and high (low <= high)."""
    span = max(high - low, 1e-9, abs(high) * 1e-9)
    size = 10.0 ** math.floor(math.log10(span / MOST_TICKS))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10, 20) if span / (size * factor) <= MOST_TICKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, max(last, first + 1) + 1)]


def _line(series: Series, x_at: Scale, y_at: Scale) -> Line:
    points = [(x_at(x), y_at(y)) for x, y, _, _ in series.points]
    marks = tuple(
        Mark(*point, f"{series.name}, {x:g} live: {series.shown.format(y)}")
        for point, (x, y, _, _) in zip(points, series.points, strict=True)
    )
    upper = [(x_at(x), y_at(high)) for x, _, _, high in series.points]
    lower = [(x_at(x), y_at(low)) for x, _, low, _ in series.points]
    spread = any(low < high for _, _, low, high in series.points)
    return Line(series.name, series.style, marks, _path(points), _path([*upper, *reversed(lower)]) if spread else "")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if place else 'M'}{x:.2f} {y:.2f}" for place, (x, y) in enumerate(points))


def _along(first: float, last: float, start: float, end: float) -> Scale:
    """From [first, last] to [start, end]; a single value goes to the middle."""
    if first == last:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - first) / (last - first) * (end - start)
