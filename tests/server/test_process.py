"""`serve` as a process of its own: the address line, signals, and exit codes."""

from __future__ import annotations

import asyncio
import re
import signal
import time

import grpc
import pytest
from live_server import run
from server_process import address_of, process

from dcut_server.client import CallFailed, Chunk, DcutClient
from dcut_trt.types import FinishReason


async def read(client: DcutClient, chunks: list[Chunk], max_tokens: int) -> None:
    async for chunk in client.generate("a prompt", max_tokens=max_tokens, ignore_eos=True):
        chunks.append(chunk)


def test_sigterm_lets_live_streams_finish_and_refuses_new_ones() -> None:
    with process("0.01", "20") as server:
        address = address_of(server)

        async def test() -> None:
            async with DcutClient(address) as client:
                chunks: list[Chunk] = []
                stream = asyncio.create_task(read(client, chunks, 200))
                while not chunks:
                    await asyncio.sleep(0.01)
                server.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
                with pytest.raises(CallFailed) as caught:
                    await client.complete("too late")
                assert caught.value.code is grpc.StatusCode.UNAVAILABLE
                await stream
                assert chunks[-1].finish is FinishReason.LENGTH
                assert sum(len(chunk.token_ids) for chunk in chunks) == 200

        run(test)
        _, errors = server.communicate(timeout=10)
        assert server.returncode == 0, errors


@pytest.mark.parametrize(("grace_s", "signals"), [("0.2", 1), ("60", 2)])
def test_the_grace_time_and_a_second_signal_cut_streams_with_a_status(grace_s: str, signals: int) -> None:
    with process("0.02", grace_s) as server:
        address = address_of(server)

        async def test() -> None:
            async with DcutClient(address) as client:
                chunks: list[Chunk] = []
                stream = asyncio.create_task(read(client, chunks, 4000))
                while not chunks:
                    await asyncio.sleep(0.01)
                for _ in range(signals):
                    server.send_signal(signal.SIGINT)
                    await asyncio.sleep(0.1)
                with pytest.raises(CallFailed) as caught:
                    await stream
                assert caught.value.code is grpc.StatusCode.UNAVAILABLE
                assert "shutting down" in caught.value.details

        run(test)
        _, errors = server.communicate(timeout=10)
        assert server.returncode == 1
        assert "Traceback" not in errors


@pytest.mark.parametrize("fault", ["mismatch", "warm-up"])
def test_a_failed_start_exits_non_zero_and_never_claims_to_serve(fault: str) -> None:
    with process("0", "1", fault) as server:
        output, _ = server.communicate(timeout=20)
        assert server.returncode not in (0, None)
        assert output == ""


def test_a_signal_while_loading_ends_the_process_at_once() -> None:
    with process("0", "1", "loading") as server:
        time.sleep(1.5)
        begun = time.monotonic()
        server.send_signal(signal.SIGTERM)
        output, errors = server.communicate(timeout=10)
        assert time.monotonic() - begun < 5
        assert server.returncode == 1
        assert output == ""
        assert "stopped while the engine was loading" in errors


def test_stats_are_one_line_a_second() -> None:
    with process("0.02", "1") as server:
        address = address_of(server)

        async def test() -> None:
            async with DcutClient(address) as client:
                with pytest.raises(CallFailed):
                    await client.complete("a prompt", timeout_s=2.5, ignore_eos=True)

        run(test)
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=10)
        lines = [line for line in errors.splitlines() if line.startswith("running ")]
        assert 2 <= len(lines) <= 4, errors
        assert re.fullmatch(
            r"running 1 waiting 0 \| [\d.]+ tokens/s \| ratio 0\.5 \| kept \d+ of \d+ drafts \| accepted \d+", lines[0]
        )
