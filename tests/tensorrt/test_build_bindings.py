"""Every name that the build takes from TensorRT, in NVIDIA's 11.4 bindings and in those of TensorRT-RTX."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tensorrt_rtx
from nvidia_bindings import install, python_environment

import dcut_engines
from dcut_engines.digests import cache_dir

SOURCES = [Path(dcut_engines.__file__).with_name(f"tensorrt_{name}.py") for name in ("build", "network")]
# What is called on TensorRT's objects, by their class: their types are not in the source.
METHODS = {
    "Builder": "create_network create_builder_config create_optimization_profile build_serialized_network",
    "IBuilderConfig": "add_optimization_profile set_memory_pool_limit progress_monitor create_timing_cache "
    "set_timing_cache",
    "IOptimizationProfile": "set_shape",
    "INetworkDefinition": "get_layer num_layers get_input num_inputs add_shape add_cast add_elementwise",
    "OnnxParser": "parse_from_file num_errors get_error",
    "ParserError": "desc",
    "IProgressMonitor": "phase_start step_complete phase_finish",
    "IAttentionInputLayer": "attention",
    "IAttention": "key_value_lengths",
    "ITimingCache": "serialize",
    "IHostMemory": "nbytes",
}
LAYERS = ("ATTENTION_INPUT", "KV_CACHE_UPDATE", "ROTARY_EMBEDDING", "PLUGIN", "PLUGIN_V2", "PLUGIN_V3")
TYPES = ("INT32", "INT64", "FLOAT", "HALF", "BF16")
# Of tensorrt-rtx alone.
RTX_ONLY = {"ComputeCapability"}
ASK = """
import functools, json, sys, tensorrt
missing = []
for name in json.loads(sys.argv[1]):
    try:
        functools.reduce(getattr, name.split("."), tensorrt)
    except AttributeError:
        missing.append(name)
print(json.dumps(missing))
"""


def used() -> set[str]:
    names = {f"LayerType.{name}" for name in LAYERS} | {f"DataType.{name}" for name in TYPES}
    names |= {f"{kind}.{name}" for kind, listed in METHODS.items() for name in listed.split()}
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and (name := after_trt(node)):
                names.add(name)
    return names


def after_trt(node: ast.AST) -> str:
    """LayerType.TOPK for trt.LayerType.TOPK; empty for what does not start at `trt`."""
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name):
            return node.attr if node.value.id == "trt" else ""
        base = after_trt(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


@pytest.fixture(scope="module")
def missing_in_tensorrt() -> set[str]:
    folder = install(cache_dir())
    names = json.dumps(sorted(used()))
    done = subprocess.run(
        [sys.executable, "-c", ASK, names],
        capture_output=True,
        text=True,
        check=True,
        env=python_environment(folder),
        cwd=folder,
    )
    return set(json.loads(done.stdout))


def test_names_are_found_in_the_source() -> None:
    assert {"OnnxParser", "ElementWiseOperation.SUM", "MemoryPoolType.WORKSPACE", "ILogger.WARNING"} <= used()


def test_tensorrt_has_every_name(missing_in_tensorrt: set[str]) -> None:
    assert {name for name in missing_in_tensorrt if name.split(".")[0] not in RTX_ONLY} == set()


def test_tensorrt_rtx_has_every_name() -> None:
    for name in used() - {"IHostMemory.nbytes"}:
        found: object = tensorrt_rtx
        for part in name.split("."):
            found = getattr(found, part)
