"""`serve` as a process of its own: the address line, signals, and exit codes."""

from __future__ import annotations

import re
import signal
import time

import pytest
from live_server import run
from server_process import address_of, process

from dcut_server.client import CallFailed, DcutClient


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
