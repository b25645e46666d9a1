"""The parts of the Triton model that need no Triton, loaded by path, and a reply that notes what it was told."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc

from dcut_server.generated.dcut.v1 import dcut_pb2

MODEL = Path(__file__).resolve().parents[2] / "server/triton/model_repository/dcut/1"


def load(name: str) -> ModuleType:
    """By path: server/triton on sys.path would pass for the package `triton`."""
    spec = importlib.util.spec_from_file_location(name, MODEL / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


wire = load("dcut_wire")
relay = load("dcut_relay")


class Recorded:
    """A reply that notes what it was told. left: the client has gone."""

    def __init__(self) -> None:
        self.left = False
        self.sent = 0
        self.finals: list[Any] = []

    def is_cancelled(self) -> bool:
        assert not self.finals, "Triton crashes when it is asked after the final response"
        return self.left

    def send(self, _tensors: Any) -> None:
        self.sent += 1

    def finish(self, _tensors: Any, usage: dcut_pb2.Usage) -> None:
        self.finals.append(usage.output_tokens)

    def fail(self, code: grpc.StatusCode, _message: str) -> None:
        self.finals.append(code)
