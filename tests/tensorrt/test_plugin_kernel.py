"""kernel.cu against the reference by its host build, and its build for every GPU architecture."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gpu.pack_cases import LARGEST, SHAPES, exact_cases, random_case
from host_kernel import WARP, HostKernel

from dcut_plugins.confidence_topk_pack import compile as kernels
from dcut_plugins.confidence_topk_pack.contract import INPUTS, MAX_BUDGETS, MAX_POSITIONS, OUTPUTS, Packed
from dcut_plugins.confidence_topk_pack.reference import confidence_topk_pack, disagreement
from dcut_trt.errors import UnsupportedOption

STATIC_SHARED_LIMIT = 48 * 1024  # bytes; more would need an opt-in at every launch


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> HostKernel:
    return HostKernel(tmp_path_factory.mktemp("kernel"))


def same(left: Packed, right: Packed) -> bool:
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in OUTPUTS)


def test_ten_thousand_random_cases_agree_with_the_reference(kernel: HostKernel) -> None:
    rng = np.random.default_rng(1)
    differing = 0
    for number in range(10_000):
        inputs = random_case(rng, LARGEST[number // 500 % 4] if number % 500 == 0 else None)
        got = kernel.run(inputs)
        assert disagreement(inputs, got) is None
        differing += not same(got, confidence_topk_pack(inputs))
    print(f"{differing} of 10,000 cases were near-ties resolved differently")
    assert differing <= 100


def test_exact_cases_equal_the_reference(kernel: HostKernel) -> None:
    for name, inputs in exact_cases():
        assert same(kernel.run(inputs), confidence_topk_pack(inputs)), name


def test_no_result_hangs_on_the_order_of_threads_between_barriers(kernel: HostKernel) -> None:
    """A read of what another thread writes in the same phase would show as a result that depends on the order."""
    rng = np.random.default_rng(2)
    cases = [random_case(rng, shape) for shape in (*SHAPES, *LARGEST) for _ in range(3)]
    expected = [kernel.run(inputs) for inputs in cases]
    counts = (kernels.THREADS, kernels.THREADS // WARP, WARP)
    orders = [[np.arange(count)[::-1] for count in counts]]
    orders += [[rng.permutation(count) for count in counts] for _ in range(3)]
    for order in orders:
        kernel.reorder(*order)
        assert all(same(kernel.run(inputs), first) for inputs, first in zip(cases, expected, strict=True))
    kernel.reorder(*(np.arange(count) for count in counts))


def test_the_kernels_limits_are_those_of_the_contract() -> None:
    text = kernels.SOURCE.read_text(encoding="utf-8")
    limits = {name: int(value) for name, value in re.findall(r"constexpr int k(\w+) = (\d+);", text)}
    assert limits["Threads"] == kernels.THREADS
    assert limits["Threads"] * limits["Items"] == MAX_POSITIONS
    assert limits["MaxBudgets"] == MAX_BUDGETS


@pytest.mark.parametrize("architecture", kernels.ARCHITECTURES)
def test_nvcc_builds_ptx_and_cubin(architecture: int, tmp_path: Path) -> None:
    ptx = kernels.build_kernel("ptx", architecture, tmp_path).decode()
    assert f".target sm_{architecture}" in ptx
    assert f".visible .entry {kernels.KERNEL}(" in ptx
    kinds = re.findall(rf"\.param \.(\w+) .*{kernels.KERNEL}_param_\d+,?$", ptx, re.MULTILINE)
    assert kinds == ["u64"] * len(INPUTS) + ["u32"] * 3 + ["u64"] * len(OUTPUTS)
    assert f".maxntid {kernels.THREADS}" in ptx
    assert kernels.build_kernel("cubin", architecture, tmp_path)[:4] == b"\x7fELF"


@pytest.mark.parametrize("architecture", kernels.ARCHITECTURES)
def test_the_kernel_fits_its_registers_and_static_shared_memory(architecture: int, tmp_path: Path) -> None:
    options = ["-cubin", f"-arch=sm_{architecture}", "--resource-usage", "-o", tmp_path / "kernel.cubin"]
    command = [kernels.find_nvcc(), *options, kernels.SOURCE]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers, shared = (int(found[1]) for found in re.finditer(r"(\d+) (?:registers|bytes smem)", said))
    spilled = sum(int(found[1]) for found in re.finditer(r"(\d+) bytes spill", said))
    print(f"sm_{architecture}: {registers} registers per thread, {shared} bytes of shared memory")
    assert registers * kernels.THREADS <= 65536
    assert shared <= STATIC_SHARED_LIMIT
    assert spilled == 0


def test_a_built_kernel_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kernels.build_kernel("ptx", 80, tmp_path)
    (built,) = (tmp_path / "kernels").iterdir()
    built.write_bytes(b"as cached")
    assert kernels.build_kernel("ptx", 80, tmp_path) == b"as cached"
    changed = tmp_path / "kernel.cu"
    changed.write_text(kernels.SOURCE.read_text(encoding="utf-8") + "// changed\n", encoding="utf-8")
    monkeypatch.setattr(kernels, "SOURCE", changed)
    assert kernels.build_kernel("ptx", 80, tmp_path) == first
    assert len(list((tmp_path / "kernels").iterdir())) == 2


def test_what_nvcc_refuses_is_an_error_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "kernel.cu"
    broken.write_text("int no_such_thing = missing;\n", encoding="utf-8")
    monkeypatch.setattr(kernels, "SOURCE", broken)
    with pytest.raises(kernels.KernelBuildFailed, match='identifier "missing" is undefined'):
        kernels.build_kernel("ptx", 80, tmp_path)
    assert not list((tmp_path / "kernels").iterdir())


def test_a_missing_nvcc_is_an_error_that_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(kernels.NvccMissing, match="plugin-build"):
        kernels.build_kernel("ptx", 80, tmp_path)


def test_the_wheels_nvcc_comes_before_the_one_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    bundled.parent.mkdir(parents=True)
    shutil.copy("/bin/true", bundled)
    monkeypatch.syspath_prepend(tmp_path)
    assert kernels.find_nvcc() == bundled


@pytest.mark.parametrize(
    ("device", "architecture"), [((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((10, 3), 100), ((12, 1), 120)]
)
def test_a_device_gets_the_closest_architecture_it_runs(device: tuple[int, int], architecture: int) -> None:
    assert kernels.architecture_for(device) == architecture


def test_a_device_older_than_all_architectures_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match=r"compute_capability=7\.5"):
        kernels.architecture_for((7, 5))
