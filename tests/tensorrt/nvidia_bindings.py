"""NVIDIA's own Python bindings of TensorRT 11.4 on stub libraries: their code and signatures, and no TensorRT.

They live in a folder of their own, for a process of their own: python_environment() makes `import tensorrt` find them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PIN = "tensorrt-cu13-bindings==11.4.0.106"

# The functions that the bindings are linked against, by library. All return NULL, so nothing can be built or run.
FUNCTIONS = {
    "nvinfer": [
        *("createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL"),
        *("getPluginRegistry", "getBuilderPluginRegistry"),
    ],
    "nvinfer_plugin": ["initLibNvInferPlugins"],
    "nvonnxparser": ["createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getNvOnnxParserVersion"],
}
LOAD_STUBS = """\
import ctypes, pathlib
for library in sorted(pathlib.Path(__file__).parent.glob("lib*.so.11")):
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
"""
# As the wheel `tensorrt` does; the bindings and their plugin module import each other by that name.
ALIAS = """\
import sys, tensorrt_bindings
sys.modules["tensorrt"] = tensorrt_bindings
"""


def install(cache: Path) -> Path:
    """The folder with the bindings, made on first use."""
    folder = cache / "tests" / PIN.replace("==", "-")
    finished = folder / "tensorrt" / "__init__.py"
    if not finished.is_file():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--upgrade", "--target", folder, PIN], check=True)
        stubs = folder / "tensorrt_libs"
        stubs.mkdir(exist_ok=True)
        for name, functions in FUNCTIONS.items():
            _build_stub(stubs / f"lib{name}.so.11", functions)
        (stubs / "__init__.py").write_text(LOAD_STUBS, encoding="utf-8")
        finished.parent.mkdir(exist_ok=True)
        finished.write_text(ALIAS, encoding="utf-8")
    return folder


def python_environment(folder: Path) -> dict[str, str]:
    """Environment variables of a Python process that imports these bindings as `tensorrt`."""
    return {**os.environ, "PYTHONPATH": str(folder)}


def _build_stub(library: Path, functions: list[str]) -> None:
    source = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in functions)
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=source, text=True, check=True)
