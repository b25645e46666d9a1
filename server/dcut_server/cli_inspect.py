"""dcut-trt inspect: what a bundle holds, whether its files are whole, and what its steps cost."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from dcut_trt.errors import BundleError
from dcut_trt.manifest import Manifest, read_manifest, verify_files
from dcut_trt.spec.cost_table import COST_TABLE_NAME, CostTable, load_cost_table


def add_inspect_parser(commands: Any) -> None:
    parser = commands.add_parser("inspect", help="show a bundle's manifest, check its files, show its cost table")
    parser.add_argument("bundle", type=Path, metavar="DIR", help="what dcut-trt build made")
    parser.add_argument("--cost-table", type=Path, metavar="FILE", help="show this table instead of the bundle's own")


def run_inspect(args: argparse.Namespace) -> int:
    """0, or 2 when a file is missing or altered; raises BundleError when there is no manifest to read."""
    manifest = read_manifest(args.bundle)
    console = Console()
    console.print(manifest_table(manifest))
    faults = file_faults(args.bundle, manifest)
    console.print(files_table(manifest, faults))
    table_path = args.cost_table or args.bundle / COST_TABLE_NAME
    if args.cost_table is not None or table_path.is_file():
        console.print(cost_rows_table(load_cost_table(table_path, fingerprint="")))
    else:
        console.print("cost table: not measured yet; `dcut-trt serve` measures it at its first start")
    return 2 if any(faults.values()) else 0


def manifest_table(manifest: Manifest) -> Table:
    table = Table("fact", Column("value", overflow="fold"), title="bundle", show_header=False)
    drafter, target = manifest.drafter, manifest.target
    facts = {
        "key": manifest.key,
        "backend": f"{manifest.backend}, {manifest.precision}",
        "target": f"{target.identity} ({target.architecture}, {target.layers} layers, hidden {target.hidden_size})",
        "target sha256": target.sha256,
        "drafter": f"{drafter.identity} ({drafter.layers} layers)",
        "drafter reads": f"target layers {_listed(drafter.target_layer_ids)}",
        "drafter sha256": drafter.sha256,
        "draft length": f"{manifest.draft_length} ({'causal' if drafter.causal else 'bidirectional'} block)",
        "vocabulary": f"{target.vocab_size}, drafted {drafter.draft_vocab_size}",
        "ratios": _listed(manifest.ratios),
        "captured batches": _listed(manifest.captured_batches),
        "token buckets": _listed(manifest.token_buckets),
        "limits": f"{manifest.max_batch} requests per step, {manifest.max_len} tokens each",
        "built with": ", ".join(f"{tool} {version}" for tool, version in sorted(manifest.versions.items())),
    }
    for name, value in facts.items():
        table.add_row(name, escape(value))
    return table


def file_faults(bundle: Path, manifest: Manifest) -> dict[str, str]:
    """File name -> what is wrong with it, "" for a whole one."""
    faults: dict[str, str] = {}
    for name, spec in manifest.files.items():
        try:
            verify_files(bundle, dataclasses.replace(manifest, files={name: spec}))
            faults[name] = ""
        except BundleError as error:
            faults[name] = str(error)
    return faults


def files_table(manifest: Manifest, faults: dict[str, str]) -> Table:
    table = Table("file", "bytes", "checked", title="files")
    table.columns[1].justify = "right"
    for name, spec in manifest.files.items():
        fault = faults[name]
        table.add_row(escape(name), f"{spec.size:,}", f"[red]{escape(fault)}[/red]" if fault else "[green]ok[/green]")
    return table


def cost_rows_table(costs: CostTable) -> Table:
    """Milliseconds per step, by batch size and ratio, and of the drafter's pass by block depth where that is known.

    Whether they are this machine's, the fingerprint tells.
    """
    title = f"cost table, ms per step, measured {costs.measured_at}"
    ratios, depths = [f"{ratio:.0%}" for ratio in costs.ratios], [f"draft {depth}" for depth in costs.depths or ()]
    caption = "\n".join([costs.fingerprint, *_further_costs(costs)])
    table = Table("batch", "plain", *ratios, *depths, title=title, caption=escape(caption))
    for column in table.columns:
        column.justify = "right"
    for place, batch in enumerate(costs.batches):
        plain = "not measured" if costs.plain_ms is None else f"{costs.plain_ms[place]:.2f}"
        passes = () if costs.draft_ms is None else costs.draft_ms[place]
        table.add_row(str(batch), plain, *(f"{cost:.2f}" for cost in (*costs.cost_ms[place], *passes)))
    return table


def _further_costs(costs: CostTable) -> list[str]:
    lines: list[str] = []
    if costs.context_ms is not None:
        plain, request, row = dataclasses.astuple(costs.context_ms)
        lines.append(
            f"1,000 more rows of context: {plain:.2f} ms per request of a plain step, "
            f"{request:.2f} ms per request and {row:.2f} ms per row of a drafting step"
        )
    if costs.context_rows is not None:
        lines.append(f"measured at {costs.context_rows:.0f} rows of context per request")
    if costs.switch_ms is not None:
        lines.append(f"a step with another number of rows than the last one: {costs.switch_ms:.2f} ms more")
    return lines


def _listed(values: tuple[float, ...] | tuple[int, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
