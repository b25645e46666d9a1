"""Everything that the runtime backend takes from TensorRT, in NVIDIA's 11.4 bindings and in those of TensorRT-RTX."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trt_double
from nvidia_bindings import install, python_environment

from dcut_engines.digests import cache_dir
from dcut_trt.backends import tensorrt_api
from dcut_trt.backends.tensorrt_tensors import WIDTHS

CLASSES = {
    "IExecutionContext": tensorrt_api.Context,
    "ICudaEngine": tensorrt_api.Engine,
    "Runtime": tensorrt_api.Runtime,
    "IPluginRegistry": tensorrt_api.PluginRegistry,
}
DOUBLES = {
    "IExecutionContext": trt_double.Context,
    "ICudaEngine": trt_double.Engine,
    "Runtime": trt_double.Runtime,
    "IPluginRegistry": trt_double.PluginRegistry,
}
# Arguments: the module, members with parameters by class, enumerators by enum. Signatures of C++ are in docstrings.
ASK = r"""
import importlib, json, re, sys
trt = importlib.import_module(sys.argv[1])
missing = []
for kind, members in json.loads(sys.argv[2]).items():
    for member, parameters in members.items():
        found = getattr(getattr(trt, kind), member, None)
        if found is None:
            missing.append(f"{kind}.{member}")
        missing += [f"{kind}.{member}({name})" for name in parameters if not re.search(rf"\b{name}: ", found.__doc__)]
for kind, names in json.loads(sys.argv[3]).items():
    missing += [f"{kind}.{name}" for name in names if not hasattr(getattr(trt, kind), name)]
missing += [name for name in ("ILogger", "get_plugin_registry", "__version__") if not hasattr(trt, name)]
missing += [] if int(trt.ILogger.WARNING) == 2 else ["ILogger.WARNING"]
print(json.dumps(missing))
"""


def members() -> dict[str, dict[str, list[str]]]:
    return {
        kind: {
            name: [] if isinstance(member, property) else list(inspect.signature(member).parameters)[1:]
            for name, member in vars(protocol).items()
            if not name.startswith("_")
        }
        for kind, protocol in CLASSES.items()
    }


def missing(module: str, environment: dict[str, str] | None, folder: Path) -> list[str]:
    command = [sys.executable, "-c", ASK, module, json.dumps(members()), json.dumps(tensorrt_api.CONSTANTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_tensorrt_11_4_has_every_name_and_parameter() -> None:
    folder = install(cache_dir())
    assert missing("tensorrt", python_environment(folder), folder) == []


def test_tensorrt_rtx_has_every_name_and_parameter(tmp_path: Path) -> None:
    assert missing("tensorrt_rtx", None, tmp_path) == []


def test_a_name_that_is_not_there_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def deserialise(self) -> Any: ...

    monkeypatch.setitem(CLASSES, "Runtime", Wrong)
    assert missing("tensorrt_rtx", None, tmp_path) == ["Runtime.deserialise"]


def test_the_double_has_what_is_used_with_the_same_parameters() -> None:
    for kind, used in members().items():
        for name, parameters in used.items():
            found = getattr(DOUBLES[kind], name)
            if not isinstance(found, property):
                assert list(inspect.signature(found).parameters)[1:] == parameters, f"{kind}.{name}"


def test_every_element_type_is_among_the_enumerators() -> None:
    assert set(WIDTHS) == set(tensorrt_api.CONSTANTS["DataType"])
