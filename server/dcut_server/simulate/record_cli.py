"""`dcut-trt record`: a trace of a bundle's drafter on a dataset's prompts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcut_server.bench.datasets import SHIPPED, load_dataset
from dcut_server.simulate.statistics import block_statistics, visited_blocks
from dcut_server.simulate.traces import save_trace
from dcut_trt.config import EngineOptions
from dcut_trt.errors import UnsupportedOption
from dcut_trt.manifest import read_manifest
from dcut_trt.types import Request, SamplingParams

if TYPE_CHECKING:
    from dcut_server.bench.datasets import Dataset
    from dcut_trt.tokenizer import Tokenizer


def add_record_parser(commands: Any) -> None:
    """Add `record` to the commands of dcut-trt; run_record takes what it parses."""
    parser = commands.add_parser(
        "record",
        help="record what the drafter proposes after every token, for dcut-trt simulate",
        description="Answer a dataset's prompts and record, after every token, the block that the drafter proposes, "
        "its confidence, and how much of it turns out to be accepted.",
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="DIR", help="what dcut-trt build made, for backend openvino")
    add("--out", required=True, type=Path, metavar="FILE", help="the .npz to write")
    add("--dataset", default="gsm8k", metavar="NAME|FILE", help=f"{', '.join(SHIPPED)} or .json, .jsonl, .txt")
    add("--requests", type=int, default=32, metavar="N", help="prompts, from the dataset's first (default: 32)")
    add("--max-tokens", type=int, default=128, metavar="N", help="of each answer (default: 128)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--concurrency", type=int, default=8, metavar="C", help="live requests (default: 8)")
    add("--threads", type=int, metavar="N", help="CPU threads of the runtime (default: its choice)")


def run_record(args: argparse.Namespace) -> int:
    """0. Raises a DcutError for what cannot be recorded or written."""
    from dcut_server.compose import open_engine  # noqa: PLC0415 - loads the runtime
    from dcut_server.simulate.record import record_trace  # noqa: PLC0415

    for option, value, least in (("--requests", args.requests, 1), ("--max-tokens", args.max_tokens, 2)):
        if value < least:
            raise UnsupportedOption(f"{option} {value}: must be at least {least}")
    if not args.out.parent.is_dir() or args.out.is_dir():
        raise UnsupportedOption(f"--out {args.out}: must name a file in a directory that exists")
    dataset, manifest = load_dataset(args.dataset), read_manifest(args.bundle)
    if not 1 <= args.concurrency <= manifest.max_batch:
        raise UnsupportedOption(
            f"--concurrency {args.concurrency}: must be 1 to {manifest.max_batch}, the bundle's batch"
        )
    options = EngineOptions(policy="dflash", profile=False, prefix_cache=False, threads=args.threads)
    engine = open_engine(args.bundle, options)
    try:
        requests = _requests(args, dataset, engine.tokenizer)
        source = (
            f"{manifest.drafter.identity} for {manifest.target.identity}, {manifest.precision}, {dataset.name}, "
            f"{len(requests)} prompts of {args.max_tokens} tokens at most, temperature {args.temperature:g}"
        )
        trace = record_trace(engine, requests, args.concurrency, dataset.name, source)
    finally:
        engine.close()
    save_trace(trace, args.out)
    print(f"wrote {args.out}: {len(trace.confidence)} blocks of {trace.requests} requests")
    places = visited_blocks(trace)
    if len(places):
        found = block_statistics(trace, places)
        quality = f"prefix products: Spearman {found.spearman:.3f}, AUROC {found.auroc:.3f}"
        print(f"whole blocks verified: {found.tokens:.2f} tokens per step; {quality}")
    return 0


def _requests(args: argparse.Namespace, dataset: Dataset, tokenizer: Tokenizer) -> list[Request]:
    prompts = dataset.prompts[: args.requests]
    texts = [tokenizer.render_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    return [
        Request(
            request_id=prompt.id,
            prompt_ids=tuple(tokenizer.encode(text, add_special_tokens=False)),
            max_tokens=args.max_tokens,
            sampling=SamplingParams(temperature=args.temperature, seed=seed),
        )
        for seed, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
