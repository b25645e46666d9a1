"""A server over the scripted model as a process of its own, ended by its own pid."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRIPT = Path(__file__).with_name("scripted_serve.py")


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    server = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield server
    finally:
        if server.poll() is None:
            server.kill()
        server.communicate()


def address_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    found = re.fullmatch(r"dcut-trt serving on (127\.0\.0\.1:\d+)\n", line)
    assert found, line
    return found[1]
