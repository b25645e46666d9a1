"""Builds of tiny bundles, and what can be seen of them from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
