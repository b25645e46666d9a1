"""Holds every name and keyword that a source file takes from `tensorrt` against the installed bindings.

Run where `tensorrt` is nvidia_bindings. Arguments: source files. Prints what was found, as JSON, and what is missing.
Only names reached from the modules themselves are seen, such as trt.Dims.MAX_DIMS; attributes of values are not.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any


def check(source: str) -> tuple[set[str], set[str]]:
    """Dotted names and `name(keyword)`s: those there are, and those that are missing."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] == "tensorrt"
    }
    found, missing = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node, modules)):
            (missing if resolve(name) is None else found).add(name)
        if isinstance(node, ast.Call) and (name := dotted(node.func, modules)) and (function := resolve(name)):
            for keyword in node.keywords:
                (found if takes(function, str(keyword.arg)) else missing).add(f"{name}({keyword.arg})")
    return found, missing


def dotted(node: ast.AST, modules: dict[str, str]) -> str:
    """tensorrt.plugin.TensorDesc for trtp.TensorDesc; empty for what does not start at a module."""
    if isinstance(node, ast.Name):
        return modules.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, modules)
        return f"{base}.{node.attr}" if base else ""
    return ""


def resolve(name: str) -> Any:
    """The object of a dotted name, or None."""
    value = sys.modules["tensorrt"]
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    return value


def takes(function: Any, keyword: str) -> bool:
    """By its signature, or where C++ gives none by the one in its documentation."""
    try:
        return keyword in inspect.signature(function).parameters
    except ValueError:
        documented = (function.__init__ if inspect.isclass(function) else function).__doc__ or ""
        return re.search(rf"\b{keyword}: ", documented) is not None


if __name__ == "__main__":
    importlib.import_module("tensorrt.plugin")
    checked = [check(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]]
    found, missing = (set().union(*(pair[side] for pair in checked)) for side in (0, 1))
    print(json.dumps({"found": sorted(found), "missing": sorted(missing)}))
