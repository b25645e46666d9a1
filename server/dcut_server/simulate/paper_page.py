"""`python -m dcut_server.simulate.paper_page docs/paper.md`: the paper's numbers beside simulated ones, as a page."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dcut_server.simulate import lab
from dcut_server.simulate.costs import load_costs
from dcut_server.simulate.fit import FITTED
from dcut_server.simulate.paper import (
    BLOCKS,
    CONCURRENCY,
    DATASETS,
    DCUT_TOKENS,
    DEVICES,
    DRAFT_LENGTH,
    METHODS,
    PER_TOKEN,
    Comparison,
    median_error,
    paper_trace,
    within,
)
from dcut_server.simulate.scored import RATIOS, TraceQuality, trace_quality
from dcut_server.simulate.traces import RECORDED, load_recorded, load_trace

POLICIES = (
    "dflash",
    "dcut",
    "dcut-vllm",
    "tetris:{half}",
    "dspark",
    "smartspec",
    "threshold:0.5",
    "auto",
    "oracle-budget",
    "oracle",
)
Floats = NDArray[np.float64]

_STEPS_OF_16 = 1000  # measured steps at concurrency 16; larger batches need fewer for as many blocks


def page(traces: Sequence[str]) -> Iterator[str]:
    """The page's lines. traces: recorded ones, by name or file."""
    yield from _head()
    yield from _generator_section()
    yield from _table2_section(lab.paper_table2(_run(64)))
    for any_budget in (True, False):
        yield from _policy_section(any_budget=any_budget)
    yield from _trace_section([_quality(name) for name in traces])


def _quality(name: str) -> TraceQuality:
    return trace_quality(load_recorded(name) if name in RECORDED else load_trace(Path(name)))


def _run(batch: int, *, any_budget: bool = False) -> lab.Run:
    return lab.Run(_STEPS_OF_16 * 16 // batch, warm_up=150, any_budget=any_budget, paired=True)


def _head() -> Iterator[str]:
    yield from (
        "# The paper's numbers, simulated",
        "",
        "The paper is D-cut, arXiv 2607.14647. It publishes what a step costs on two GPUs by batch size and ratio,",
        "three statistics of a drafter's blocks on three datasets, and the throughput of each method. This page puts",
        "policies over those costs and over drafts with those statistics ([simulate.md](simulate.md) says how), so",
        "that they can be compared where no such GPU is at hand. Nothing on it was measured on a GPU.",
        "",
        "The page is written by `python -m dcut_server.simulate.paper_page docs/paper.md`; the drafts' statistics are",
        "fitted by `python -m dcut_server.simulate.fit`.",
        "",
    )


def _generator_section() -> Iterator[str]:
    """Published statistics beside those of the generators."""
    fitted = json.loads(FITTED.read_text(encoding="utf-8"))
    yield from (
        "## Drafts",
        "",
        "Published / generated, whole blocks verified. D-cut's are simulated at concurrency 32.",
        "",
    )
    yield from _table_head("dataset", "accepted tokens", "Spearman", "AUROC", "D-cut's accepted tokens, H20", "H800")
    for dataset in DATASETS:
        wanted, reached = BLOCKS[dataset], fitted[dataset]["reaches"]
        cells = [f"{wanted.tokens:.2f} / {reached['tokens']:.2f}"]
        cells += [f"{getattr(wanted, name):.3f} / {reached[name]:.3f}" for name in ("spearman", "auroc")]
        for device in DEVICES:
            (cell,) = lab.simulate(paper_trace(dataset), load_costs(device), 32, ["dcut"], _run(32))
            cells.append(f"{DCUT_TOKENS[dataset]:.2f} / {cell.totals.tokens_per_step:.2f}")
        yield _row(dataset, *cells)
    yield ""


def _table2_section(cells: list[Comparison]) -> Iterator[str]:
    errors = [cell.error() for cell in cells]
    yield from (
        "## Table 2",
        "",
        "How many times DFlash's throughput, published / simulated. DFlash's own published throughput is a fifth",
        "(H20) to a third (H800) lower than its profiled steps make it: prompts, longer contexts and the host take",
        "time too. Half of that time is taken to pass with every token, half to stretch the steps; the paper does not",
        "tell.",
        "",
    )
    yield from _table_head("device", "dataset", "live", *METHODS)
    by_cell = itertools.groupby(cells, lambda cell: (cell.device, cell.dataset, cell.concurrency))
    for (device, dataset, live), row in by_cell:
        yield _row(device, dataset, str(live), *(f"{cell.published:.3f} / {cell.simulated():.3f}" for cell in row))
    misses = [cell for cell in cells if abs(cell.error()) > 0.1]
    yield from (
        "",
        f"{within(errors, 0.1)} of {len(cells)} cells are within 10 %, {within(errors, 0.05)} within 5 %; at the "
        f"median they are {100 * median_error(errors):.1f} % off.",
        "Off by more than 10 %: " + ("; ".join(_miss(cell) for cell in misses) or "none") + ".",
        "",
        "With another share of that time passing per token:",
        "",
    )
    yield from _table_head("share", "within 10 %", "within 5 %", "median")
    for share in (0.0, 0.25, PER_TOKEN, 0.75, 1.0):
        off = [cell.error(share) for cell in cells]
        yield _row(f"{share:g}", str(within(off, 0.1)), str(within(off, 0.05)), f"{100 * median_error(off):.1f} %")
    yield ""


def _miss(cell: Comparison) -> str:
    return f"{cell.method} on {cell.device}, {cell.dataset}, {cell.concurrency} live ({100 * cell.error():+.0f} %)"


def _policy_section(*, any_budget: bool) -> Iterator[str]:
    """All policies at every device, dataset and concurrency, as multiples of the paper's rule."""
    rows = "any number of rows" if any_budget else "the table's four ratios only"
    yield from (
        f"## Policies where the target runs {rows}",
        "",
        "Tokens per second as multiples of the paper's rule, `dcut`; only steps count. All meet the same blocks.",
        "TETRIS verifies half of all positions. `oracle-budget` ranks as the paper does, each budget chosen knowing",
        "what will be accepted; `oracle` ranks by it, too. Generated drafts have neither words nor margins, so that",
        "`auto` gains here by its budgets alone.",
        "",
    )
    yield from _table_head("device", "dataset", "live", *(name.partition(":")[0] for name in POLICIES))
    speeds: list[list[float]] = []
    for device, dataset, batch in itertools.product(DEVICES, DATASETS, CONCURRENCY):
        names = [name.format(half=batch * (DRAFT_LENGTH + 1) // 2 - batch) for name in POLICIES]
        run = _run(batch, any_budget=any_budget)
        cells = lab.simulate(paper_trace(dataset), load_costs(device), batch, names, run)
        speed = [cell.totals.tokens_per_s for cell in cells]
        speeds.append([value / speed[POLICIES.index("dcut")] for value in speed])
        yield _row(device, dataset, str(batch), *(f"{value:.3f}" for value in speeds[-1]))
    against = np.array(speeds)  # [18, policies]
    ceiling = against[:, POLICIES.index("oracle-budget")]
    auto = against[:, POLICIES.index("auto")]
    yield _row("mean", "", "", *(f"{value:.3f}" for value in against.mean(axis=0)))
    yield _row("least", "", "", *(f"{value:.3f}" for value in against.min(axis=0)))
    yield from (
        "",
        f"`auto` is at least {auto.min():.4f} times as fast as `dcut`, and reaches {_percent(auto / ceiling)} of "
        f"`oracle-budget` in the mean, {_percent((auto / ceiling).min())} at least; `dcut` reaches "
        f"{_percent(1 / ceiling)}.",
        "",
    )


def _trace_section(qualities: list[TraceQuality]) -> Iterator[str]:
    """Prefix product against the fitted score, on recorded drafts."""
    yield from (
        "## Recorded drafts",
        "",
        "SmolLM2-135M-Instruct with its DFlash drafter (D = 7), bf16, replayed once from start to end with 8 live",
        "requests. The fitted score starts untaught on each trace and learns from the drafts that are verified, here",
        "all of them; each draft is scored before it is learnt. Prefix product / fitted score:",
        "",
    )
    yield from _table_head("trace", "blocks", "tokens/step", "Spearman", "AUROC", "calibration error")
    for quality in qualities:
        plain, fitted = quality.prefix, quality.fitted
        yield _row(
            quality.name,
            str(quality.blocks),
            f"{quality.tokens:.2f}",
            f"{plain.spearman:.4f} / {fitted.spearman:.4f}",
            f"{plain.auroc:.4f} / {fitted.auroc:.4f}",
            f"{plain.calibration_error:.4f} / {fitted.calibration_error:.4f}",
        )
    yield from (
        "",
        "Tokens per verified row when every step verifies so many of its rows, ranked by the one or the other:",
        "",
    )
    yield from _table_head("trace", *(f"{ratio:g}" for ratio in RATIOS))
    for quality in qualities:
        pairs = zip(quality.prefix.tokens_per_row, quality.fitted.tokens_per_row, strict=True)
        yield _row(quality.name, *(f"{plain:.4f} / {fitted:.4f}" for plain, fitted in pairs))
    yield ""


def _percent(shares: Floats | float) -> str:
    return f"{100 * np.mean(shares):.1f} %"


def _table_head(*names: str) -> Iterator[str]:
    yield _row(*names)
    yield "|" + "---|" * len(names)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Arguments: the file to write, then recorded traces by name or file; without any, the shipped ones."""
    out, *traces = sys.argv[1:]
    Path(out).write_text("\n".join(page(traces or RECORDED)), encoding="utf-8")


if __name__ == "__main__":
    main()
