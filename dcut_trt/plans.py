"""Whether the plans of a bundle are for the machine and the TensorRT at hand; asked before one is loaded."""

from __future__ import annotations

import shlex
from pathlib import Path

from dcut_trt.errors import BundleError, EngineMismatch
from dcut_trt.manifest import Manifest

PLANS = ("target", "drafter")


def check_plan_fits(manifest: Manifest, bundle: Path, *, backend: str, version: str, compute_capability: str) -> None:
    """Hold a bundle to the runtime that is about to load it: a plan runs on what it was built by and for, nothing else.

    backend: "tensorrt" or "tensorrt-rtx".  version: the runtime's own, such as "11.4.0.106".
    compute_capability: the device's, such as "8.9".
    Raises EngineMismatch with both values and the command that builds anew, BundleError when a plan is not listed.
    """
    pairs = (
        ("backend", manifest.backend, backend),
        ("TensorRT", manifest.tensorrt, version),
        ("compute capability", manifest.compute_capability, compute_capability),
    )
    for name, built, found in pairs:
        if built != found:
            raise EngineMismatch(
                f"{bundle}: the plans were built for {name} {built}; this machine has {found}. "
                f"Rebuild: {rebuild_command(manifest, bundle, backend)}"
            )
    for name in PLANS:
        plan = manifest.plans.get(name)
        if plan is None or plan.file not in manifest.files:
            raise BundleError(f"{bundle}: the manifest lists no plan for the {name}. Rebuild with: dcut-trt build")


def rebuild_command(manifest: Manifest, bundle: Path, backend: str) -> str:
    """The command that builds this bundle for this machine. Models are named as the manifest knows them."""
    arguments = {
        "--target": manifest.target.identity,
        "--drafter": manifest.drafter.identity,
        "--out": str(bundle),
        "--backend": backend,
        "--precision": manifest.precision,
        "--max-batch": str(manifest.max_batch),
        "--max-len": str(manifest.max_len),
        "--ratios": ",".join(f"{ratio:g}" for ratio in manifest.ratios),
    }
    if manifest.prefill_chunk:
        arguments["--prefill-chunk"] = str(manifest.prefill_chunk)
    return shlex.join(["dcut-trt", "build", *(part for pair in arguments.items() for part in pair)])
