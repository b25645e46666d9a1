"""kernel.cu by nvcc, to PTX that goes into plans or to a cubin; each result is made once and found by content."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Literal

from dcut_trt.errors import DcutError, UnsupportedOption

SOURCE = Path(__file__).with_name("kernel.cu")
KERNEL = "confidence_topk_pack"
THREADS = 1024

# Compute capabilities times ten. PTX of each runs on every later device too, compiled by its driver.
ARCHITECTURES = (80, 90, 100, 120)


class NvccMissing(DcutError):
    """No CUDA compiler is installed."""


class KernelBuildFailed(DcutError):
    """nvcc refused the kernel; the message is nvcc's."""


def architecture_for(compute_capability: tuple[int, int]) -> int:
    """The closest of ARCHITECTURES that a device of this compute capability runs.

    Raises UnsupportedOption for a device older than all of them.
    """
    major, minor = compute_capability
    runnable = [architecture for architecture in ARCHITECTURES if architecture <= 10 * major + minor]
    if not runnable:
        oldest = ARCHITECTURES[0] / 10
        raise UnsupportedOption(f"compute_capability={major}.{minor}: the plugin's kernel needs {oldest} or newer")
    return runnable[-1]


def find_nvcc() -> Path:
    """The nvcc of the installed wheels, else the one on PATH.

    The wheels come first because they are pinned: a newer nvcc writes PTX that an older driver does not read.
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        bundled = Path(folder) / "cu13" / "bin" / "nvcc"
        if bundled.is_file():
            return bundled
    on_path = shutil.which("nvcc")
    if on_path is None:
        raise NvccMissing("nvcc was not found: pip install 'dcut-trt[plugin-build]', or put CUDA 13's bin on PATH")
    return Path(on_path)


def build_kernel(kind: Literal["ptx", "cubin"], architecture: int, cache: Path) -> bytes:
    """The kernel for one of ARCHITECTURES, from `cache` when the same compiler built the same source before.

    Raises NvccMissing and KernelBuildFailed.
    """
    nvcc = find_nvcc()
    target = f"compute_{architecture}" if kind == "ptx" else f"sm_{architecture}"
    options = [f"-{kind}", f"-arch={target}", "--Werror=all-warnings"]
    inputs = [SOURCE.read_bytes(), _run([nvcc, "--version"]).encode(), *(option.encode() for option in options)]
    key = hashlib.sha256(b"\0".join(inputs)).hexdigest()
    built = cache / "kernels" / f"{KERNEL}-{architecture}-{key[:16]}.{kind}"
    if not built.is_file():
        built.parent.mkdir(parents=True, exist_ok=True)
        temporary = built.with_name(f"{built.name}.{uuid.uuid4().hex}.tmp")
        _run([nvcc, *options, SOURCE, "-o", temporary])
        temporary.replace(built)
    return built.read_bytes()


def _run(command: list[str | Path]) -> str:
    """Standard output of a command; on failure KernelBuildFailed with all it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr + done.stdout).strip()
        raise KernelBuildFailed(f"{' '.join(map(str, command))} exited with {done.returncode}: {said}")
    return done.stdout
