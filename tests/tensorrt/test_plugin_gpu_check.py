"""tests/gpu/kernel_check.py from end to end on a stand-in for the CUDA driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dcut_plugins.confidence_topk_pack import compile as kernels

HERE = Path(__file__).parent
SCRIPT = HERE.parent / "gpu" / "kernel_check.py"


def build_driver(folder: Path, source: Path = kernels.SOURCE) -> Path:
    """nvcc as a plain C++ compiler that knows where its own cuda.h is."""
    library, path = folder / "libcuda.so.1", f'-DKERNEL_SOURCE="{source}"'
    options = ["-x", "c++", "-shared", "--cudart=none", "-Xcompiler=-fPIC,-O2,-Wno-attributes", f"-I{HERE}", path]
    command = [kernels.find_nvcc(), *options, HERE / "fake_libcuda.cpp", "-o", library]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_checks_and_times_every_batch(driver: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = run("--driver-library", driver, "--cases", 60, "--json", results)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stand-in, compute capability 9.0, CUDA 13" in done.stdout
    report = json.loads(results.read_text(encoding="utf-8"))
    assert report["failures"] == []
    assert report["launch_us"] == pytest.approx(dict.fromkeys(("1", "2", "4", "8", "16", "32", "64"), 8.0))
    assert report["target_met"] is True


def test_a_wrong_kernel_fails_it(tmp_path: Path) -> None:
    wrong = tmp_path / "kernel.cu"
    text = kernels.SOURCE.read_text(encoding="utf-8")
    broken = text.replace("utilities[ratio] > best", "utilities[ratio] >= best")  # the last of equals
    assert broken != text
    wrong.write_text(broken, encoding="utf-8")
    done = run("--driver-library", build_driver(tmp_path, wrong), "--cases", 10)
    assert done.returncode == 1
    assert "exact case" in done.stdout


def test_without_a_driver_it_says_so(tmp_path: Path) -> None:
    done = run("--driver-library", tmp_path / "libcuda.so.1")
    assert done.returncode == 2
    assert done.stderr.startswith("kernel check: not run: no NVIDIA driver")


def test_a_refused_call_is_reported_by_name(driver: Path, tmp_path: Path) -> None:
    (tmp_path / "other.ptx").write_text("not ptx", encoding="utf-8")
    done = run("--driver-library", driver, "--ptx", tmp_path / "other.ptx")
    assert done.returncode == 2
    assert "cuModuleLoadData: error 218, said by the stand-in" in done.stderr
