"""Through Dynamo's frontend, every server on one CPU thread: tokens/s of two workers and of one, and what a kill costs.

python tests/dynamo/throughput.py BUNDLE
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from cluster import Cluster, cluster, model_listed
from small_bundles import small_bundle

CONCURRENCY, MAX_BATCH, STREAMS = 16, 16, 8
PROMPT = "Write a story about a sailor who lost his map. Number {}:"


async def tokens_per_second(here: Cluster, requests: int, max_tokens: int) -> float:
    """Output tokens over wall time, with CONCURRENCY requests in flight."""
    model = await model_listed(here)
    slots = asyncio.Semaphore(CONCURRENCY)
    async with here.client() as client:

        async def one(number: int) -> int:
            async with slots:
                answer = await client.completions.create(
                    model=model, prompt=PROMPT.format(number), max_tokens=max_tokens, temperature=0
                )
            assert answer.usage is not None
            return answer.usage.completion_tokens

        await asyncio.gather(*map(one, range(CONCURRENCY)))  # a warm round
        started = time.perf_counter()
        counts = await asyncio.gather(*map(one, range(requests)))
        return sum(counts) / (time.perf_counter() - started)


async def longest_pauses(here: Cluster, streams: int) -> list[float]:
    """Seconds between two texts of each stream at most, when one of two workers is killed in mid-stream."""
    model = await model_listed(here)
    begun = [asyncio.Event() for _ in range(streams)]

    async def read(number: int) -> float:
        stream = await client.completions.create(
            model=model, prompt=PROMPT.format(number), max_tokens=128, temperature=0, stream=True
        )
        times = []
        async for _ in stream:
            begun[number].set()
            times.append(time.perf_counter())
        return max(after - before for before, after in itertools.pairwise(times))

    async with here.client() as client:
        reading = [asyncio.create_task(read(number)) for number in range(streams)]
        await asyncio.gather(*(event.wait() for event in begun))
        await here.workers[0].end(signal.SIGKILL)
        return list(await asyncio.gather(*reading))


async def measure(bundle: Path, requests: int, max_tokens: int) -> None:
    rates: list[float] = []
    for size in (1, 2):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            async with cluster(small_bundle(bundle, folder / "bundle", MAX_BATCH), folder, size) as here:
                rates.append(await tokens_per_second(here, requests, max_tokens))
                pauses = await longest_pauses(here, STREAMS) if size == 2 else []
        print(f"{size} worker{'s' * (size > 1)}: {rates[-1]:.0f} output tokens/s", flush=True)
    print(f"two / one: {rates[1] / rates[0]:.2f}")
    print(f"kill -9 of a worker: {len(pauses)} of {STREAMS} streams complete, longest pause {max(pauses):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    asyncio.run(measure(args.bundle.resolve(), args.requests, args.max_tokens))


if __name__ == "__main__":
    main()
