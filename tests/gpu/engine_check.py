"""Plans on a GPU: build, greedy parity with fp32 on the CPU, step latency per bucket, plain / dflash / dcut.

Needs TensorRT 11 with its GPU, torch, nvcc and the model's wheel. Prints tables, writes JSON by --json. Exit status: 0
when at least FIRST_TOKENS of the texts begin as in fp32 on the CPU, 1 when fewer do, 2 when TensorRT is not there.

No GPU has run this script yet; `--backend openvino --precision bf16` takes the same way on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from dcut_engines.build_options import BuildOptions
from dcut_engines.bundle import build
from dcut_server.bench.datasets import load_dataset
from dcut_server.bench.options import BenchOptions
from dcut_server.bench.report import THROUGHPUT_LEGEND, throughput_table
from dcut_server.bench.runner import Pass, chat_requests, measure, serve
from dcut_server.bench.summary import summarise
from dcut_server.cli_inspect import cost_rows_table
from dcut_server.compose import open_engine
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.errors import DcutError
from dcut_trt.spec.policies import make_policy
from dcut_trt.types import Request

TARGET, DRAFTER = "smollm2-135m-instruct", "smollm2-135m-dflash-b8"
PARITY = BenchOptions(("plain", "dflash", "ratio:0.25", "dcut"), (8,), requests=16, rounds=1, max_tokens=32)
FIRST_TOKENS = 0.75  # half precision parts texts at near-ties, but rarely at once
COMPARED = BenchOptions(("plain", "dflash", "dcut"), (1, 8, 32), rounds=2, max_tokens=128)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bundles/gpu-check"), help="where bundles are built")
    parser.add_argument("--backend", default="tensorrt", choices=("tensorrt", "tensorrt-rtx", "openvino"))
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        report = run(args, Console(width=120))
    except DcutError as error:
        print(f"engine_check: {error}", file=sys.stderr)
        return 2
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if report["parity"]["first_token_equal"] >= FIRST_TOKENS else 1


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Everything that was measured, as JSON's types."""
    begun = time.monotonic()
    bundle = build(BuildOptions(TARGET, DRAFTER, args.out / args.backend, args.backend, args.precision))
    reference = build(BuildOptions(TARGET, DRAFTER, args.out / "reference"))
    build_s = time.monotonic() - begun
    console.print(f"built in {build_s:.1f} s: {bundle}")
    dataset = load_dataset("gsm8k").prompts
    cpu = open_engine(reference, EngineOptions(policy="plain", profile=False))
    requests = chat_requests(dataset, cpu.tokenizer, PARITY)
    expected = answers(cpu, requests[:16], "plain")
    cpu.close()

    engine = open_engine(bundle, EngineOptions())
    assert engine.cost_table is not None
    console.print(cost_rows_table(engine.cost_table))
    parity = compare({name: answers(engine, requests[:16], name) for name in PARITY.policies}, expected)
    console.print(f"greedy parity with fp32 on CPU: {parity}")
    cells = summarise(measure(engine, chat_requests(dataset, engine.tokenizer, COMPARED), COMPARED))
    console.print(throughput_table(cells, f"{args.backend} {args.precision}, gsm8k"))
    console.print(THROUGHPUT_LEGEND)
    table = engine.cost_table
    engine.close()
    return {
        "backend": args.backend,
        "precision": args.precision,
        "build_s": round(build_s, 1),
        "fingerprint": table.fingerprint,
        "cost_ms": table.cost_ms.tolist(),
        "plain_ms": table.plain_ms.tolist(),
        "parity": parity,
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }


def answers(engine: Engine, requests: list[Request], policy: str) -> list[list[int]]:
    """Output ids of every request, served eight at a time."""
    engine.policy = make_policy(policy, engine.cost_table)
    served: Pass = serve(engine, requests, PARITY.concurrency[0], policy)
    return [stream.tokens for stream in served.streams]


def compare(found: dict[str, list[list[int]]], expected: list[list[int]]) -> dict[str, Any]:
    """Per policy, how many of the texts equal the reference; and the share of all that begin with its first token."""
    equal = {name: sum(a == b for a, b in zip(outputs, expected, strict=True)) for name, outputs in found.items()}
    first = [a[:1] == b[:1] for outputs in found.values() for a, b in zip(outputs, expected, strict=True)]
    return {"equal": equal, "of": len(expected), "first_token_equal": sum(first) / len(first)}


if __name__ == "__main__":
    sys.exit(main())
