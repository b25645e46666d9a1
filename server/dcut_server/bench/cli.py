"""`dcut-trt bench`: policies against each other, in one process, on the same prompts."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dcut_server.bench.datasets import SHIPPED, Dataset, load_dataset
from dcut_server.bench.options import (
    DEFAULT_CONCURRENCY,
    DEFAULT_POLICIES,
    BenchOptions,
    InvalidBenchOption,
    check_batch,
    check_requests,
)
from dcut_trt.config import EngineOptions
from dcut_trt.manifest import Manifest, read_manifest
from dcut_trt.spec.policies import POLICY_NAMES

if TYPE_CHECKING:
    from dcut_server.bench.runner import Progress
    from dcut_server.bench.summary import Cell
    from dcut_trt.engine import Engine


def add_bench_parser(commands: Any) -> None:
    """Add `bench` to the commands of dcut-trt; run_bench takes what it parses."""
    defaults = BenchOptions()
    parser = commands.add_parser("bench", help="compare policies on this machine, on the same prompts")
    add = parser.add_argument
    policies, live = ",".join(DEFAULT_POLICIES), ",".join(str(value) for value in DEFAULT_CONCURRENCY)
    add("bundle", type=Path, metavar="DIR", help="what dcut-trt build made")
    add("--policies", type=policy_names, default=policies, metavar="P,..", help=f"{POLICY_NAMES}; default: {policies}")
    add("--concurrency", type=integers, default=live, metavar="C,..", help=f"live requests; default: {live}")
    add("--dataset", default="gsm8k", metavar="NAME|FILE", help=f"{', '.join(SHIPPED)} or .json, .jsonl, .txt")
    add("--requests", type=int, metavar="N", help="per policy and round; default: 3 x concurrency, at least 8")
    add("--rounds", type=int, default=defaults.rounds, metavar="R", help=f"default: {defaults.rounds}")
    add("--max-tokens", type=int, default=defaults.max_tokens, metavar="N", help=f"default: {defaults.max_tokens}")
    add("--range-ratio", type=float, default=0.0, metavar="R", help="limits of N x (1 - R) to N x (1 + R)")
    add("--temperature", type=numbers, default=(0.0,), metavar="T,..", help="each runs all of it; default: 0, greedy")
    add("--ignore-eos", action="store_true", help="go on to --max-tokens, so that all runs are equally long")
    add("--warmup", action=argparse.BooleanOptionalAction, default=True, help="a short unmeasured run before each")
    add("--threads", type=int, metavar="N", help="CPU threads of the runtime (default: its choice)")
    add("--kv-memory-mib", type=int, metavar="N", help="memory for both KV caches")
    add("--cost-table", type=Path, metavar="FILE", help="use this table instead of the bundle's own")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--plot", type=Path, metavar="FILE", help="draw tokens per second against concurrency, as a PNG")


def run_bench(args: argparse.Namespace) -> int:
    """Measure what the parsed arguments ask for and print it. Raises a DcutError for what cannot be measured.

    0, or 1 when an fp32 policy gave other tokens than plain decoding: rounding at near-ties may do that in bf16 only.
    """
    from dcut_server.bench.runner import chat_requests, measure  # noqa: PLC0415 - loads the runtime
    from dcut_server.bench.summary import summarise  # noqa: PLC0415
    from dcut_server.compose import open_engine  # noqa: PLC0415

    # Every policy runs the same prompts: with a prefix cache only the first would pay for them.
    options, engine_options = bench_options(args), EngineOptions(**_engine_settings(args), prefix_cache=False)
    dataset = load_dataset(args.dataset)
    _check_outputs(args, options)
    manifest = read_manifest(args.bundle)
    check_batch(options, manifest.max_batch)
    console = Console(stderr=True)
    with progress_on(console) as progress:
        engine = open_engine(args.bundle, engine_options, lambda stage, done, total: progress(done, total, stage))
        try:
            requests = chat_requests(dataset.prompts, engine.tokenizer, options)
            check_requests(options, requests, engine.limits)
            facts = _facts(args, options, dataset, manifest, engine)
            cells = summarise(measure(engine, requests, options, progress))
        finally:
            engine.close()
    _publish(args, facts, cells)
    lossy = [cell for cell in cells if cell.difference is not None and cell.difference.tokens]
    if lossy and manifest.precision == "fp32":
        names = ", ".join(f"{cell.policy} at {cell.concurrency}" for cell in lossy)
        print(f"dcut-trt bench: fault: fp32 output differs from plain decoding: {names}", file=sys.stderr)
        return 1
    return 0


def bench_options(args: argparse.Namespace) -> BenchOptions:
    """Raises InvalidBenchOption naming option, value and limit."""
    return BenchOptions(
        policies=args.policies,
        concurrency=args.concurrency,
        requests=args.requests,
        rounds=args.rounds,
        max_tokens=args.max_tokens,
        range_ratio=args.range_ratio,
        temperatures=args.temperature,
        ignore_eos=args.ignore_eos,
        warm_up=args.warmup,
    )


@contextmanager
def progress_on(console: Console) -> Iterator[Progress]:
    """A bar on a terminal; elsewhere one line for each thing that begins."""
    if not console.is_terminal:
        shown: list[str] = []

        def line(done: int, total: int, what: str) -> None:
            if shown[-1:] != [what]:
                shown.append(what)
                console.print(f"[{done}/{total}] {what}", markup=False, highlight=False)

        yield line
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bar(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _publish(args: argparse.Namespace, facts: dict[str, Any], cells: list[Cell]) -> None:
    from dcut_server.bench import report  # noqa: PLC0415
    from dcut_server.bench.plot import write_plot  # noqa: PLC0415
    from dcut_server.bench.summary import policy_means  # noqa: PLC0415

    console = Console()
    if console.width < report.NARROWEST:
        console = Console(width=report.NARROWEST)
    bundle, dataset = facts["bundle"], facts["dataset"]["name"]
    title = f"{bundle['target']} {bundle['precision']}, {dataset}, {args.max_tokens} tokens at most"
    for temperature in dict.fromkeys(cell.temperature for cell in cells):
        own = [cell for cell in cells if cell.temperature == temperature]
        console.print(report.throughput_table(own, f"{title}, temperature {temperature:g}"))
        console.print(report.time_table(own, "a decoding step in milliseconds, and what a reader waits for"))
    console.print(report.means_table(policy_means(cells), "geometric means of tokens/s"))
    console.print(report.lossless_line(cells, bundle["precision"]), markup=False, highlight=False)
    for line in (report.THROUGHPUT_LEGEND, report.TIME_LEGEND):
        console.print(line, style="dim", markup=False, highlight=False)
    if args.json is not None:
        report.write_json(report.report_document(facts, cells), args.json)
    if args.plot is not None:
        machine = f"{facts['machine']['fingerprint'].partition('; ')[2]}, {facts['machine']['usable_cpus']} CPUs"
        write_plot(cells, args.plot, title, machine)
    for path in (args.json, args.plot):
        if path is not None:
            console.print(f"wrote {path}", markup=False, highlight=False)


def _facts(
    args: argparse.Namespace, options: BenchOptions, dataset: Dataset, manifest: Manifest, engine: Engine
) -> dict[str, Any]:
    """What was measured, and on what."""
    from dcut_server.bench import environment  # noqa: PLC0415
    from dcut_trt.spec.profiler import machine_fingerprint  # noqa: PLC0415

    versions = environment.versions()
    runtime = f"{manifest.backend} {versions.get(manifest.backend, '')}"
    fingerprint = machine_fingerprint(manifest.key, runtime, args.threads)
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": environment.command_line(),
        "machine": environment.machine_facts(fingerprint),
        "versions": versions,
        "bundle": environment.bundle_facts(args.bundle, manifest),
        "dataset": {**dataclasses.asdict(dataset), "prompts": len(dataset.prompts)},
        "options": dataclasses.asdict(options),
        "cost_table": environment.cost_table_facts(engine.cost_table),
    }


def _engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("threads", "kv_memory_mib", "cost_table")}


def _check_outputs(args: argparse.Namespace, options: BenchOptions) -> None:
    """Fail now and not after the measurement."""
    from dcut_server.bench.plot import check_plot  # noqa: PLC0415

    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and (not path.parent.is_dir() or path.is_dir()):
            raise InvalidBenchOption(option, path, "must name a file in a directory that exists")
    if args.plot is not None:
        check_plot()
        if len(options.temperatures) > 1:
            limit = "draws one --temperature; dcut-trt report draws several, from the file of --json"
            raise InvalidBenchOption("--plot", args.plot, limit)


def policy_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of integers") from None


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of numbers") from None
