"""Who may import whom: the layers of the runtime, and the one place for every foreign runtime."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {
    "dcut_trt": ROOT / "dcut_trt",
    "dcut_engines": ROOT / "engines" / "dcut_engines",
    "dcut_plugins": ROOT / "plugins" / "dcut_plugins",
    "dcut_server": ROOT / "server" / "dcut_server",
}

# A module imports only from rows above its own. A new module must be put into a row.
LAYERS = [
    set(row.split())
    for row in (
        "types errors typed_json",
        "stage_types",
        "config manifest metrics stopping detokenizer adjusting backends.base kv.prefix",
        "plans tokenizer sequence admission kv.paged kv.slots spec.packing spec.accept spec.cost_table",
        "kv.sharing",
        "sampling scheduler spec.selector backends.openvino backends.tensorrt",
        "logprobs spec.policy spec.load events",
        "spec.rules spec.baselines spec.score spec.cost_model spec.replay spec.arms spec.arm_costs",
        "spec.auto",
        "spec.policies",
        "choice step_values",
        "engine",
        "loop spec.sweep backends.scripted",
        "spec.profiler",
    )
]

OURS_ALLOWED = {
    "dcut_trt": {"dcut_trt"},
    "dcut_engines": {"dcut_engines", "dcut_trt", "dcut_plugins"},
    "dcut_plugins": {"dcut_plugins", "dcut_trt"},
    "dcut_server": {"dcut_server", "dcut_trt", "dcut_engines"},
}

# Foreign package -> the files and folders that may import it.
HOMES = {
    "aiohttp": ("server/dcut_server/dashboard/", "server/dcut_server/bench/paths"),
    "dynamo": ("server/dcut_server/dynamo/",),
    "grpc": ("server/dcut_server/",),
    "grpc_health": ("server/dcut_server/",),
    "grpc_reflection": ("server/dcut_server/",),
    "openvino": ("dcut_trt/backends/openvino.py", "engines/dcut_engines/emit_openvino.py"),
    "tensorrt": ("dcut_trt/backends/tensorrt", "engines/dcut_engines/", "plugins/dcut_plugins/"),
    "tensorrt_rtx": ("dcut_trt/backends/tensorrt", "engines/dcut_engines/", "plugins/dcut_plugins/"),
    "onnx": ("engines/dcut_engines/", "plugins/dcut_plugins/"),
    "onnxruntime": (),
    "torch": ("engines/dcut_engines/train/",),
    "transformers": (),
    "gguf": ("engines/dcut_engines/",),
    "safetensors": ("engines/dcut_engines/",),
    "tokenizers": ("dcut_trt/tokenizer.py", "dcut_trt/backends/scripted.py", "engines/dcut_engines/"),
    "jinja2": ("dcut_trt/tokenizer.py", "server/dcut_server/report_page/page.py"),
}

COMPOSITION_ROOT = "server/dcut_server/compose.py"


def sources(room: str) -> Iterator[Path]:
    return (path for path in sorted(ROOMS[room].rglob("*.py")) if "generated" not in path.parts)


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imported(path: Path) -> set[str]:
    """Full names of everything a file imports, at its top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


EVERY_FILE = [path for room in ROOMS for path in sources(room)]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_the_rooms_they_may(room: str) -> None:
    for path in sources(room):
        wrong = {name for name in imported(path) for other in ROOMS if within(name, other)} - {
            name for name in imported(path) for other in OURS_ALLOWED[room] if within(name, other)
        }
        assert not wrong, f"{place(path)} imports {sorted(wrong)}"


@pytest.mark.parametrize("package", HOMES)
def test_a_foreign_package_is_imported_only_in_its_homes(package: str) -> None:
    for path in EVERY_FILE:
        if any(within(name, package) for name in imported(path)):
            assert place(path).startswith(HOMES[package]), f"{place(path)} imports {package}"


def runtime_modules() -> dict[str, Path]:
    """Module name inside dcut_trt -> file; packages' own files are left out."""
    files = (path for path in sources("dcut_trt") if path.name != "__init__.py")
    return {".".join(path.relative_to(ROOMS["dcut_trt"]).with_suffix("").parts): path for path in files}


def unit(module: str) -> str:
    """The files of a concrete backend, such as backends.tensorrt_plan, count as one module."""
    return module.partition("_")[0] if within(module, "backends") else module


def runtime_imports(path: Path) -> set[str]:
    """Units of dcut_trt that a file imports."""
    names = imported(path)
    return {unit(module) for module in runtime_modules() if any(within(name, f"dcut_trt.{module}") for name in names)}


def test_concrete_backends_are_named_only_where_a_server_is_composed() -> None:
    own = {path: unit(module) for module, path in runtime_modules().items()}
    for path in EVERY_FILE:
        backends = {name for name in runtime_imports(path) if within(name, "backends")}
        named = backends - {"backends.base", own.get(path)}
        assert not named or place(path) == COMPOSITION_ROOT, f"{place(path)} imports {sorted(named)}"


def test_every_module_of_the_runtime_has_a_layer() -> None:
    assert {unit(module) for module in runtime_modules()} <= set().union(*LAYERS)


def test_modules_of_the_runtime_import_only_from_layers_above() -> None:
    layer_of = {module: number for number, layer in enumerate(LAYERS) for module in layer}
    for module, path in runtime_modules().items():
        for other in runtime_imports(path) - {unit(module)}:
            assert layer_of[other] < layer_of[unit(module)], f"dcut_trt.{module} imports dcut_trt.{other}"
