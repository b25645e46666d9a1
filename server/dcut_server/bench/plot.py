"""Throughput against concurrency, one line per policy, as a PNG."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcut_server.bench.summary import PLAIN, Cell
from dcut_trt.errors import UnsupportedOption

INK, FAINT, GRID = "#1f2328", "#6e7781", "#e4e7eb"
# The default rule stands out; fixed ratios are shades of one colour, since they are one family.
STRONG = "auto"
COLOURS = {PLAIN: "#8c959f", "dflash": "#d1741f", "dcut": "#1a56c4", STRONG: "#c8323f"}
RATIO_SHADES = ("#6dbfae", "#3c9c88", "#1f7a68", "#0f4f44")
OTHERS = ("#8250df", "#bf3989", "#9a6700", "#1283a8", "#7d7a00", "#57606a")
LABEL_GAP = 0.042  # of the axis height, between the labels at the lines' ends


def check_plot() -> None:
    """Raise UnsupportedOption when the library that draws is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedOption("--plot: needs matplotlib, which is not installed: pip install 'dcut-trt[bench]'")


def write_plot(cells: Sequence[Cell], path: Path, title: str, subtitle: str) -> None:
    """Draw tokens per second of every policy; a band spans the rounds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 5.6), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.075, 0.1, 0.75, 0.74))
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    colours = _colours(policies)
    for policy in policies:
        _line(axes, [cell for cell in cells if cell.policy == policy], colours[policy])
    _dress(axes, sorted({cell.concurrency for cell in cells}))
    _label_ends(axes, {policy: [c for c in cells if c.policy == policy][-1] for policy in policies}, colours)
    figure.text(0.075, 0.945, title, fontsize=13, fontweight="bold", color=INK)
    figure.text(0.075, 0.9, subtitle, fontsize=9, color=FAINT)
    figure.savefig(path, format="png")


def _colours(policies: Sequence[str]) -> dict[str, str]:
    ratios = sorted((name for name in policies if name.startswith("ratio:")), key=lambda name: float(name[6:]))
    others = [name for name in policies if name not in COLOURS and name not in ratios]
    step = len(RATIO_SHADES) / max(1, len(ratios))
    shades = {name: RATIO_SHADES[int((index + 0.5) * step)] for index, name in enumerate(ratios)}
    return {**COLOURS, **shades, **{name: OTHERS[index % len(OTHERS)] for index, name in enumerate(others)}}


def _line(axes: Any, cells: Sequence[Cell], colour: str) -> None:
    cells = sorted(cells, key=lambda cell: cell.concurrency)
    live = [cell.concurrency for cell in cells]
    strong = cells[0].policy == STRONG
    axes.fill_between(
        live,
        [min(cell.tokens_per_s_rounds) for cell in cells],
        [max(cell.tokens_per_s_rounds) for cell in cells],
        color=colour,
        alpha=0.13,
        linewidth=0,
    )
    axes.plot(
        live,
        [cell.tokens_per_s for cell in cells],
        color=colour,
        linewidth=2.6 if strong else 1.6,
        marker="o",
        markersize=5.5 if strong else 4,
        linestyle="--" if cells[0].policy == PLAIN else "-",
        zorder=3 if strong else 2,
    )


def _dress(axes: Any, live: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(live, [str(value) for value in live])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("live requests", color=FAINT, fontsize=9)
    axes.set_title("output tokens per second", loc="left", color=FAINT, fontsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _label_ends(axes: Any, last: dict[str, Cell], colours: dict[str, str]) -> None:
    """Name each line at its right end, moved apart where two ends are close."""
    top = axes.get_ylim()[1]
    ends = sorted((cell.tokens_per_s / top, policy) for policy, cell in last.items())
    places = spread_apart([height for height, _ in ends], LABEL_GAP)
    for place, (height, policy) in zip(places, ends, strict=True):
        speedup = last[policy].speedup
        text = policy if speedup is None or policy == PLAIN else f"{policy}  {speedup:.2f}x"
        axes.annotate(
            text,
            xy=(1.0, height),
            xytext=(1.025, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colours[policy],
            fontsize=9.5,
            fontweight="bold" if policy == STRONG else "normal",
            va="center",
            annotation_clip=False,
        )


def spread_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved as little as a sweep can so that neighbours are at least `gap` apart."""
    groups: list[tuple[float, int]] = []  # centre, members
    for height in heights:
        centre, members = height, 1
        while groups and centre - groups[-1][0] < gap * (members + groups[-1][1]) / 2:
            other, count = groups.pop()
            centre, members = (centre * members + other * count) / (members + count), members + count
        groups.append((centre, members))
    return [centre + gap * (place - (members - 1) / 2) for centre, members in groups for place in range(members)]
