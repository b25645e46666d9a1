"""`dcut-trt bench-paths`: what each way to reach the server costs against the engine alone, in one run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from dcut_server.bench.cli import integers
from dcut_server.bench.datasets import SHIPPED, Dataset, load_dataset
from dcut_server.bench.options import BenchOptions, check_batch, check_requests
from dcut_trt.config import EngineOptions
from dcut_trt.errors import UnsupportedOption
from dcut_trt.manifest import read_manifest

if TYPE_CHECKING:
    from dcut_server.bench.paths import PathPass, Sender
    from dcut_trt.engine import Engine

ENGINE = "engine"


def add_bench_paths_parser(commands: Any) -> None:
    """Add `bench-paths`; run_bench_paths takes what it parses."""
    parser = commands.add_parser("bench-paths", help="compare gRPC, OpenAI HTTP and Triton with the engine alone")
    add = parser.add_argument
    add("bundle", type=Path, metavar="DIR", help="what dcut-trt build made")
    add("--concurrency", type=integers, default=(1, 16), metavar="C,..", help="live requests; default: 1,16")
    add("--dataset", default="gsm8k", metavar="NAME|FILE", help=f"{', '.join(SHIPPED)} or .json, .jsonl, .txt")
    add("--rounds", type=int, default=3, metavar="R", help="turns of every path; default: 3")
    add("--max-tokens", type=int, default=96, metavar="N", help="made by every request; default: 96")
    add("--policy", default="dcut", help="default: dcut")
    add("--port", type=int, default=50051, help="where the server that is measured listens; default: 50051")
    add("--no-openai", action="store_true", help="leave the OpenAI gateway out")
    add("--triton", metavar="URL", help="HTTP address of a Triton whose model `dcut` calls that server")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")


def run_bench_paths(args: argparse.Namespace) -> int:
    """Measure and print. Raises a DcutError for what cannot be measured."""
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from dcut_server.compose import open_engine  # noqa: PLC0415 - loads the runtime

    options = BenchOptions((args.policy,), args.concurrency, None, args.rounds, args.max_tokens, ignore_eos=True)
    dataset = load_dataset(args.dataset)
    check_batch(options, read_manifest(args.bundle).max_batch)
    engine = await asyncio.to_thread(open_engine, args.bundle, EngineOptions(policy=args.policy, prefix_cache=False))
    try:
        async with _senders(args, engine) as senders:
            passes = await _measure(engine, senders, dataset, options)
    finally:
        engine.close()
    print_paths(passes, Console())
    if args.json is not None:
        write_paths(passes, args, args.json)
    return 0


@asynccontextmanager
async def _senders(args: argparse.Namespace, engine: Engine) -> AsyncIterator[dict[str, Sender]]:
    """A server of the same bundle as a process, and a sender for each path to it."""
    from dcut_server.bench import paths  # noqa: PLC0415 - loads gRPC
    from dcut_server.client import DcutClient  # noqa: PLC0415
    from dcut_server.serve_process import serve_process  # noqa: PLC0415

    openai_port = args.port + 1
    # Every path sends the same prompts: one that came later must not find them computed.
    flags = ["--port", str(args.port), "--policy", args.policy, "--no-prefix-cache"]
    flags += [] if args.no_openai else ["--openai-port", str(openai_port)]
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve_process(args.bundle, flags, lambda stage, done, total: None))
        client = await stack.enter_async_context(DcutClient(server.address))
        senders = {"grpc": paths.grpc_sender(client, args.max_tokens)}
        if not args.no_openai or args.triton:
            session = await stack.enter_async_context(_http_session())
            if not args.no_openai:
                base_url = f"http://127.0.0.1:{openai_port}/v1"
                model = await paths.wait_for_model(session, base_url)
                senders["openai"] = paths.openai_sender(session, base_url, model, args.max_tokens)
            if args.triton:
                render = _chat_renderer(engine)
                senders["triton"] = paths.triton_sender(session, args.triton.rstrip("/"), render, args.max_tokens)
        yield senders
        await server.stop()


async def _measure(
    engine: Engine, senders: dict[str, Sender], dataset: Dataset, options: BenchOptions
) -> list[PathPass]:
    """Every path takes its turn on the same prompts in every round; a short unmeasured turn comes first."""
    from dcut_server.bench import paths  # noqa: PLC0415
    from dcut_server.bench.runner import chat_requests, round_slice, serve  # noqa: PLC0415

    requests = chat_requests(dataset.prompts, engine.tokenizer, options)
    check_requests(options, requests, engine.limits)
    prompts = {prompt.id: prompt for prompt in dataset.prompts}
    passes: list[PathPass] = []
    for concurrency in options.concurrency:
        for round_number in range(-1, options.rounds):
            part = round_slice(requests, options.requests_at(concurrency), max(round_number, 0))
            part = part[:concurrency] if round_number < 0 else part
            chosen = [prompts[request.request_id.partition(":")[2]] for request in part]
            served = await asyncio.to_thread(serve, engine, part, concurrency, ENGINE, round_number)
            turn = [paths.of_engine(served, options.max_tokens)]
            for name, send in senders.items():
                turn.append(await paths.closed_loop(name, send, chosen, concurrency, options.max_tokens, round_number))
            passes += turn if round_number >= 0 else []
    return passes


def _http_session() -> Any:
    try:
        import aiohttp  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UnsupportedOption("openai and triton: need aiohttp: pip install 'dcut-trt[dashboard]'") from error
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_read=300)
    )


def _chat_renderer(engine: Engine) -> Any:
    return lambda text: engine.tokenizer.render_chat([{"role": "user", "content": text}])


def print_paths(passes: Sequence[PathPass], console: Console) -> None:
    """One line per concurrency and path; ratios are to the engine alone, medians over rounds and requests."""
    table = Table(title="what a path costs: served by the same bundle, on the same prompts, in turns")
    for name in ("live", "path", "tokens/s", "of engine", "first token ms", "added", "whole request ms", "added"):
        table.add_column(name, justify="left" if name == "path" else "right")
    for row in path_rows(passes):
        table.add_row(
            str(row["concurrency"]),
            str(row["path"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['of_engine']:.3f}",
            f"{row['first_ms']:.1f}",
            f"{row['first_added_ms']:+.1f}",
            f"{row['whole_ms']:.1f}",
            f"{row['whole_added_ms']:+.1f}",
        )
    console.print(table)


def path_rows(passes: Sequence[PathPass]) -> list[dict[str, Any]]:
    """The table as numbers. of_engine: the median over the rounds of tokens/s over the engine's in the same round."""
    groups: dict[tuple[int, str], list[PathPass]] = {}
    for served in passes:
        groups.setdefault((served.concurrency, served.path), []).append(served)
    rows = []
    for (concurrency, path), group in groups.items():
        base = groups[concurrency, ENGINE]
        first, whole = (median(_all(group, name)) for name in ("first_ms", "whole_ms"))
        ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(group, base, strict=True)]
        rows.append(
            {
                "concurrency": concurrency,
                "path": path,
                "tokens_per_s": sum(one.output_tokens for one in group) / sum(one.wall_s for one in group),
                "of_engine": median(ratios),
                "first_ms": first,
                "first_added_ms": first - median(_all(base, "first_ms")),
                "whole_ms": whole,
                "whole_added_ms": whole - median(_all(base, "whole_ms")),
            }
        )
    return rows


def _all(group: Sequence[PathPass], name: str) -> list[float]:
    return [value for served in group for value in getattr(served, name)]


def write_paths(passes: Sequence[PathPass], args: argparse.Namespace, path: Path) -> None:
    """Every pass, the table, and what they were measured on, as JSON."""
    from dcut_server.bench import environment, report  # noqa: PLC0415

    manifest = read_manifest(args.bundle)
    document = {
        "command": environment.command_line(),
        "versions": environment.versions(),
        "bundle": environment.bundle_facts(args.bundle, manifest),
        "rows": path_rows(passes),
        "passes": [dataclasses.asdict(served) for served in passes],
    }
    report.write_json(document, path)
