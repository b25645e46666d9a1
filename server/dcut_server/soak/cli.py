"""`dcut-trt soak`: minutes of mixed load on a real server process, and whether anything was lost or leaked."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcut_trt.errors import DcutError, UnsupportedOption
from dcut_trt.manifest import read_manifest

if TYPE_CHECKING:
    from dcut_server.client import DcutClient
    from dcut_server.soak.load import Tally

WAVE_S = (2.0, 6.0)
WAVES_PER_CHECK = 4
IDLE_TIMEOUT_S = 30.0
MAX_QUEUE = 8  # small, so that refusals at capacity are part of the load


@dataclass(frozen=True, slots=True)
class Check:
    """The server between two waves, idle. rss_mib: resident memory.  handles: open files and sockets."""

    at_s: float
    requests: int
    rss_mib: float
    handles: int
    threads: int
    free_kv_blocks: int


def add_soak_parser(commands: Any) -> None:
    """Add `soak`; run_soak takes what it parses."""
    parser = commands.add_parser("soak", help="load a server with everything mixed and look for what is lost or leaks")
    add = parser.add_argument
    add("bundle", type=Path, metavar="DIR", help="what dcut-trt build made")
    add("--minutes", type=float, default=10.0, metavar="N", help="default: 10")
    add("--seed", type=int, default=0, help="of the load (default: 0)")
    add("--policy", default="dcut", help="default: dcut")
    add("--kv-memory-mib", type=int, default=512, metavar="N", help="small, so that KV blocks run out; default: 512")
    add("--no-profile", action="store_true", help="never measure step costs; for every policy but dcut")
    add("--max-growth-mib", type=float, default=64.0, metavar="N", help="memory growth that is a leak; default: 64")
    add("--json", type=Path, metavar="FILE", help="write everything that was seen")


def run_soak(args: argparse.Namespace) -> int:
    """0, or 1 when a stream was lost, an answer changed, or something leaked."""
    if not args.minutes > 0:
        raise UnsupportedOption(f"minutes={args.minutes}: must be more than 0")
    checks, tally = asyncio.run(_soak(args))
    faults = faults_of(checks, tally, args.max_growth_mib)
    for line in (*summary_lines(checks, tally), *(f"FAULT {fault}" for fault in faults)):
        print(line)
    if args.json is not None:
        document = {
            "checks": [dataclasses.asdict(check) for check in checks],
            "kinds": tally.kinds,
            "outcomes": tally.outcomes,
            "output_tokens": tally.output_tokens,
            "faults": faults,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if faults else 0


async def _soak(args: argparse.Namespace) -> tuple[list[Check], Tally]:
    from dcut_server.client import DcutClient  # noqa: PLC0415 - loads gRPC
    from dcut_server.serve_process import serve_process  # noqa: PLC0415
    from dcut_server.soak.load import Knobs, Tally, load_for  # noqa: PLC0415

    manifest = read_manifest(args.bundle)
    knobs = Knobs(manifest.target.vocab_size, manifest.precision == "fp32")
    random_, tally = random.Random(args.seed), Tally()
    checks: list[Check] = []
    # All of a small KV cache is in use after the first waves, so what memory grows by later is a leak.
    flags = [
        "--policy",
        args.policy,
        "--max-queue",
        str(MAX_QUEUE),
        "--kv-memory-mib",
        str(args.kv_memory_mib),
        *(["--no-profile"] if args.no_profile else []),
    ]
    async with serve_process(args.bundle, flags, lambda stage, done, total: None) as server:
        begun = time.monotonic()
        async with DcutClient(server.address) as client:
            while (left := begun + args.minutes * 60 - time.monotonic()) > 0 or len(checks) < 2:
                for _ in range(WAVES_PER_CHECK):
                    concurrency = random_.randint(1, manifest.max_batch + 2 * MAX_QUEUE)
                    seconds = min(random_.uniform(*WAVE_S), max(left / WAVES_PER_CHECK, WAVE_S[0] / 2))
                    await load_for(client, concurrency, seconds, knobs, random_, tally)
                checks.append(await _check(client, server.pid, time.monotonic() - begun, tally))
                print(check_line(checks[-1]), flush=True)
        code = await server.stop()
        if code != 0:
            tally.lost.append(f"the server ended with code {code}")
    return checks, tally


async def _check(client: DcutClient, pid: int, at_s: float, tally: Tally) -> Check:
    """Wait until the server is idle, and read what it holds. Raises DcutError when it does not become idle."""
    end = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        gauges = (await client.info()).gauges
        if gauges.running == gauges.waiting == 0:
            break
        if time.monotonic() > end:
            raise DcutError(f"the server is not idle: {gauges.running} running, {gauges.waiting} waiting, no client")
        await asyncio.sleep(0.05)
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Check(
        at_s=at_s,
        requests=tally.kinds.total(),
        rss_mib=int(status["VmRSS"].split()[0]) / 1024,
        handles=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
        free_kv_blocks=gauges.free_kv_blocks,
    )


def faults_of(checks: list[Check], tally: Tally, max_growth_mib: float) -> list[str]:
    """What no soak may show, in words. Growth counts from the end of the first quarter: until then shapes that
    the runtime meets for the first time, and KV blocks, take the memory that they will keep."""
    first, last = checks[len(checks) // 4], checks[-1]
    faults = [*tally.lost[:20], *(f"another answer to {text!r}" for text in tally.changed[:20])]
    if last.rss_mib - first.rss_mib > max_growth_mib:
        faults.append(f"memory grew from {first.rss_mib:.0f} to {last.rss_mib:.0f} MiB, limit {max_growth_mib:g}")
    for name in ("handles", "threads"):
        if getattr(last, name) > getattr(first, name) + 2:  # gRPC's poller comes and goes
            faults.append(f"{name} grew from {getattr(first, name)} to {getattr(last, name)}")
    if len({check.free_kv_blocks for check in checks}) > 1:
        faults.append(f"free KV blocks when idle: {sorted({check.free_kv_blocks for check in checks})}")
    return faults


def check_line(check: Check) -> str:
    return (
        f"{check.at_s:6.0f} s | {check.requests} requests | {check.rss_mib:.0f} MiB | {check.handles} handles | "
        f"{check.threads} threads | {check.free_kv_blocks} KV blocks free"
    )


def summary_lines(checks: list[Check], tally: Tally) -> list[str]:
    highest = max(check.rss_mib for check in checks)
    return [
        f"{tally.kinds.total()} requests, {tally.output_tokens} output tokens in {checks[-1].at_s:.0f} s",
        "sent: " + ", ".join(f"{kind} {count}" for kind, count in sorted(tally.kinds.items())),
        "ended: " + ", ".join(f"{outcome} {count}" for outcome, count in sorted(tally.outcomes.items())),
        f"lost {len(tally.lost)}, changed answers {len(tally.changed)}, "
        f"memory {checks[0].rss_mib:.0f} -> {checks[-1].rss_mib:.0f} MiB (highest {highest:.0f})",
    ]
