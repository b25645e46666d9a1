"""Draws a dashboard of this folder as a PNG, from a running Prometheus and without Grafana. Needs dcut-trt[bench]."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image

COLUMNS = 24  # of Grafana's grid
UNIT_WIDTH, UNIT_HEIGHT = 0.6, 0.36  # inches of one cell of the grid
LINE_HEIGHT = 0.16  # inches of one row of a legend
LEGEND_COLUMNS = 4
INK, FAINT, GRID = "#1f2328", "#6e7781", "#e4e7eb"
COLOURS = ("#1a56c4", "#d1741f", "#1f7a68", "#bf3989", "#8250df", "#9a6700", "#3c9c88", "#cf222e", "#57606a", "#54aeff")


class RenderError(Exception):
    """A panel that cannot be drawn; the message names it."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel. points: (unix time, value), with nan where the query has no value."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Source:
    """What queries are asked of. variables: what stands for $name in them; start, end, step: unix seconds."""

    url: str
    variables: Mapping[str, str]
    start: int
    end: int
    step: int

    def panel(self, panel: Mapping[str, Any]) -> list[Series]:
        """Every series of the panel's targets. Raises RenderError when one fails or has nothing to draw."""
        series: list[Series] = []
        for target in panel["targets"]:
            try:
                series += self._target(target)
            except RenderError as error:
                raise RenderError(f"panel {panel['title']!r}: {target['expr']}: {error}") from error
        return series

    def _target(self, target: Mapping[str, Any]) -> list[Series]:
        query = self._substitute(target["expr"])
        if target.get("instant"):
            rows = self._ask("query", query=query, time=self.end)
            series = [Series(_legend(target, row["metric"]), [_point(row["value"])]) for row in rows]
        else:
            rows = self._ask("query_range", query=query, start=self.start, end=self.end, step=self.step)
            series = [Series(_legend(target, row["metric"]), self._aligned(row["values"])) for row in rows]
        if not any(math.isfinite(value) for line in series for _, value in line.points):
            raise RenderError("no data")
        return series

    def _substitute(self, expression: str) -> str:
        try:
            return re.sub(r"\$(?:\{(\w+)[^}]*\}|(\w+))", lambda match: self.variables[match[1] or match[2]], expression)
        except KeyError as error:
            raise RenderError(f"unknown variable ${error.args[0]}") from error

    def _ask(self, path: str, **parameters: str | int) -> list[dict[str, Any]]:
        address = f"{self.url.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:  # Prometheus says what is wrong with a query in the body
            raise RenderError(f"{error}: {error.read().decode(errors='replace')}") from error
        except (OSError, ValueError) as error:
            raise RenderError(f"{self.url}: {error}") from error
        return list(answer["data"]["result"])

    def _aligned(self, values: Sequence[Sequence[Any]]) -> list[tuple[float, float]]:
        known = dict(map(_point, values))
        return [(moment, known.get(moment, math.nan)) for moment in range(self.start, self.end + 1, self.step)]


def _point(pair: Sequence[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


def _legend(target: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), target["legendFormat"])


def render(dashboard: Mapping[str, Any], source: Source) -> Figure:
    """Every panel at its place in the grid. Raises RenderError for the first that cannot be drawn."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    figure = Figure(figsize=(COLUMNS * UNIT_WIDTH, rows * UNIT_HEIGHT), facecolor="white")
    for panel in dashboard["panels"]:
        if panel["type"] not in DRAW:
            raise RenderError(f"panel {panel['title']!r}: type {panel['type']!r} is none of {', '.join(DRAW)}")
        series = source.panel(panel)
        axes = figure.add_axes(_inside(panel["gridPos"], rows, math.ceil(len(series) / LEGEND_COLUMNS)))
        axes.set_title(panel["title"], loc="left", fontsize=10, fontweight="bold", color=INK)
        DRAW[panel["type"]](axes, panel, series)
    return figure


def _inside(place: Mapping[str, int], rows: int, legend_rows: int) -> tuple[float, float, float, float]:
    """Left, bottom, width and height of a panel's axes, as shares of the figure."""
    width, height, below = COLUMNS * UNIT_WIDTH, rows * UNIT_HEIGHT, 0.3 + LINE_HEIGHT * legend_rows
    return (
        (place["x"] * UNIT_WIDTH + 0.6) / width,
        ((rows - place["y"] - place["h"]) * UNIT_HEIGHT + below) / height,
        (place["w"] * UNIT_WIDTH - 0.8) / width,
        (place["h"] * UNIT_HEIGHT - below - 0.35) / height,
    )


def _timeseries(axes: Any, panel: Mapping[str, Any], series: Sequence[Series]) -> None:
    for number, line in enumerate(series):
        moments = [datetime.fromtimestamp(moment, UTC) for moment, _ in line.points]
        colour, style = COLOURS[number % len(COLOURS)], "-" if number < len(COLOURS) else "--"
        axes.plot(moments, [value for _, value in line.points], style, color=colour, linewidth=1.3, label=line.name)
    axes.set_xlim(moments[0], moments[-1])
    axes.set_ylim(bottom=0)
    top = axes.get_ylim()[1]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _text(value, panel, top)))
    axes.xaxis.set_major_locator(AutoDateLocator(minticks=3, maxticks=7))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S", tz=UTC))
    axes.tick_params(labelsize=7, colors=FAINT, length=0)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_frame_on(False)
    below = -0.2 / (axes.get_position().height * axes.figure.get_figheight())
    axes.legend(loc="upper left", bbox_to_anchor=(-0.03, below), ncols=LEGEND_COLUMNS, borderpad=0, labelspacing=0.25,
                frameon=False, fontsize=7.5, handlelength=1.2, columnspacing=1.2, labelcolor=INK)  # fmt: skip


def _stat(axes: Any, panel: Mapping[str, Any], series: Sequence[Series]) -> None:
    axes.set_axis_off()
    named = panel.get("options", {}).get("textMode") == "name"
    latest = [next(value for _, value in reversed(line.points) if math.isfinite(value)) for line in series]
    texts = [line.name if named else _text(value, panel, value) for line, value in zip(series, latest, strict=True)]
    axes.text(0.5, 0.5, "\n".join(texts), ha="center", va="center", fontsize=24, color=COLOURS[2])


DRAW = {"timeseries": _timeseries, "stat": _stat}


def _text(value: float, panel: Mapping[str, Any], top: float) -> str:
    """The value in the panel's unit; `top`, the axis' largest, chooses its prefix."""
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        return f"{value:.3g} s" if top >= 1 else f"{value * 1000:.3g} ms"
    return f"{value / 1000:.3g} k" if top >= 5000 else f"{value:.4g}"


def main() -> int:
    """Draw one dashboard; 1 and one line on stderr when a panel cannot be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--dashboard", required=True, type=Path, metavar="FILE")
    parser.add_argument("--out", required=True, type=Path, metavar="PNG")
    parser.add_argument("--minutes", type=float, default=15, metavar="N", help="how far back (default: 15)")
    parser.add_argument("--rate-interval", default="20s", metavar="D", help="4 scrape intervals (default: 20s)")
    options = parser.parse_args()
    dashboard = json.loads(options.dashboard.read_text())
    seconds, end = round(options.minutes * 60), int(time.time())
    step = max(1, seconds // 240)
    listed = dashboard.get("templating", {}).get("list", [])
    variables = {item["name"]: str(item["current"]["value"]) for item in listed}
    variables |= {"__rate_interval": options.rate_interval, "__interval": f"{step}s", "__range": f"{seconds}s"}
    try:
        figure = render(dashboard, Source(options.prometheus, variables, end - seconds, end, step))
    except RenderError as error:
        print(f"render.py: {error}", file=sys.stderr)
        return 1
    figure.savefig(options.out, dpi=100)
    with Image.open(options.out) as image:  # lines on white need no more than 256 colours: a third of the bytes
        small = image.convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE)
    small.save(options.out, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
