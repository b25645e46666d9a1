"""What a benchmark ran on: machine, versions and bundle, so that two reports can be told apart."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from dcut_trt.manifest import Manifest
from dcut_trt.spec.cost_table import CostTable

PACKAGES = ("dcut-trt", "openvino", "numpy", "tokenizers")


def machine_facts(fingerprint: str) -> dict[str, Any]:
    """fingerprint: as in a cost table; it names the processor. Load averages are those of now."""
    return {
        "fingerprint": fingerprint,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": list(os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that a measurement depends on; one that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def bundle_facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "path": str(path),
        "key": manifest.key,
        "backend": manifest.backend,
        "precision": manifest.precision,
        "target": manifest.target.identity,
        "drafter": manifest.drafter.identity,
        "draft_length": manifest.draft_length,
        "max_batch": manifest.max_batch,
        "max_len": manifest.max_len,
    }


def cost_table_facts(table: CostTable | None) -> dict[str, Any] | None:
    """The costs that policies divided by, in milliseconds; None where there is no table."""
    if table is None:
        return None
    raw = dataclasses.asdict(table)
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in raw.items()}


def command_line() -> list[str]:
    return ["dcut-trt", *sys.argv[1:]]
