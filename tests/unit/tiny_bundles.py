"""Builds of tiny bundles, here and in a process of their own, and what can be seen of them from outside."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openvino as ov
import pytest
from tiny_checkpoints import write_drafter, write_target

from dcut_engines.build_options import BuildOptions
from dcut_engines.bundle import build


def tiny_options(directory: Path) -> BuildOptions:
    """A tiny target and its drafter, to be built in directory/out/bundle."""
    target, drafter = write_target(directory / "target"), write_drafter(directory / "drafter")
    return BuildOptions(str(target), str(drafter), directory / "out" / "bundle", max_batch=6, max_len=64)


def changed(options: BuildOptions, **fields: Any) -> BuildOptions:
    return dataclasses.replace(options, **fields)


def wrote(options: BuildOptions) -> bool:
    """Build; whether that wrote a bundle, rather than found it."""
    seen: list[str] = []

    @contextmanager
    def progress(stage: str) -> Iterator[None]:
        seen.append(stage)
        yield

    build(options, progress)
    return "write the target" in seen


def leftovers(options: BuildOptions) -> list[str]:
    """What unfinished builds have left beside the bundle."""
    return [entry.name for entry in options.out.parent.iterdir() if ".build-" in entry.name]


def read_graph(path: Path) -> ov.Model:
    core = ov.Core()
    core.get_versions("CPU")  # loads the plugin, and with it the paged attention op that the file names
    return core.read_model(path)


BUILDER = """
    import sys, time
    from contextlib import contextmanager
    from pathlib import Path
    from dcut_engines.bundle import build
    from dcut_engines.build_options import BuildOptions

    target, drafter, out, precision, stop_at = sys.argv[1:]

    @contextmanager
    def progress(stage):
        print(stage, flush=True)
        if stage == stop_at:
            time.sleep(600)
        yield

    build(BuildOptions(target, drafter, Path(out), precision=precision, max_batch=6, max_len=64), progress)
    print("done", flush=True)
"""


def start_builder(options: BuildOptions, precision: str = "fp32", stop_at: str = "") -> subprocess.Popen[str]:
    arguments = [options.target, options.drafter, str(options.out), precision, stop_at]
    command = [sys.executable, "-c", textwrap.dedent(BUILDER), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(builder: subprocess.Popen[str], stage: str) -> None:
    assert builder.stdout is not None
    for line in builder.stdout:
        if line.strip() == stage:
            return
    pytest.fail(f"the builder ended before it reached {stage!r}")
