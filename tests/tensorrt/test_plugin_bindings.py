"""plugin.py on NVIDIA's own Python code of TensorRT 11.4: registration, shapes, launch parameters, names used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvidia_bindings import install, python_environment

from dcut_engines.digests import cache_dir
from dcut_plugins.confidence_topk_pack import compile as kernels
from dcut_plugins.confidence_topk_pack.contract import DOMAIN, NAME, VERSION

HERE = Path(__file__).parent
PLUGIN = kernels.SOURCE.with_name("plugin.py")


@pytest.fixture(scope="module")
def bindings() -> Path:
    return install(cache_dir())


def run(bindings: Path, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, HERE / script, *map(str, arguments)]
    environment = python_environment(bindings)
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=bindings)


def report(bindings: Path, script: str, *arguments: object) -> dict[str, Any]:
    done = run(bindings, script, *arguments)
    assert done.returncode == 0, done.stderr
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def test_a_build_gets_shapes_types_kernel_and_arguments(bindings: Path) -> None:
    driven = report(bindings, "drive_plugin.py", 1, 8, 64, 15, 4)
    assert driven["registered"] == [[NAME, VERSION, DOMAIN]]  # once, though registered twice
    assert driven["fields"] == []
    assert driven["serialized_fields"] == []
    assert driven["num_outputs"] == 7
    assert driven["output_shapes"] == [[1], ["B"], ["(B + 1)"], *[["(B * 16)"]] * 4]
    assert driven["output_types"] == ["DataType.INT32"] * 7
    assert driven["aliased"] == [-1] * 7
    assert driven["formats"] == ["DataType.FLOAT TensorFormat.LINEAR", "DataType.INT32 TensorFormat.LINEAR"]
    assert driven["tactics"] == []  # none of our own, so TensorRT passes its default
    assert driven["launch"] == {
        **dict.fromkeys(("grid_x", "grid_y", "grid_z", "block_y", "block_z"), 1),
        "block_x": kernels.THREADS,
        "shared_mem": 0,
    }
    assert driven["arguments"] == [["PluginArgDataType.INT32", size] for size in ("B", 15, 4)]
    assert driven["kernel"] == [kernels.KERNEL, "second ptx"]
    assert driven["kind"] == "_TemplateAOTPlugin"


def test_a_static_batch_gives_static_shapes(bindings: Path) -> None:
    driven = report(bindings, "drive_plugin.py", 256, 256, 256, 15, 32)
    assert driven["output_shapes"] == [[1], [256], [257], *[[4096]] * 4]
    assert driven["arguments"] == [["PluginArgDataType.INT32", size] for size in (256, 15, 32)]


@pytest.mark.parametrize(
    ("profile", "message"),
    [((1, 8, 257, 15, 4), "batch=257, draft length=15"), ((1, 8, 64, 15, 33), "budgets=33")],
)
def test_a_profile_past_the_kernels_limits_is_refused(bindings: Path, profile: tuple[int, ...], message: str) -> None:
    done = run(bindings, "drive_plugin.py", *profile)
    assert done.returncode != 0
    assert f"UnsupportedOption: {message}" in done.stderr


def test_every_name_and_keyword_of_tensorrt_exists(bindings: Path) -> None:
    names = report(bindings, "check_bindings.py", PLUGIN)
    assert names["missing"] == []
    used = {"register", "register(lazy_register)", "aot_impl", "KernelLaunchParams(block_x)", "SymInt32", "TensorDesc"}
    assert {f"tensorrt.plugin.{name}" for name in used} <= set(names["found"])


def test_a_name_or_keyword_that_tensorrt_lacks_is_seen(bindings: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import tensorrt as trt\ntrt.Bilder\ntrt.OnnxParser(network=1, loger=2)\ntrt.MemoryPoolType.WORKSPACE\n",
        encoding="utf-8",
    )
    names = report(bindings, "check_bindings.py", wrong)
    assert names["missing"] == ["tensorrt.Bilder", "tensorrt.OnnxParser(loger)"]
    assert "tensorrt.OnnxParser(network)" in names["found"]
    assert "tensorrt.MemoryPoolType.WORKSPACE" in names["found"]
