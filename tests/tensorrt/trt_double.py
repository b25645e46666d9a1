"""A stand-in of TensorRT's runtime: the same calls, the same rules, and ONNX Runtime behind them on host memory.

A plan is JSON that names an ONNX graph and its profiles. What the rules forbid raises Broken, where TensorRT itself
returns False it does so too.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
from host_device import STREAMS, HostDevice

ALIGNMENT = 256
SCRATCH_PER_ROW = 1000  # bytes; any number that grows with a profile will do
TAG = b"double:"
KINDS = {"tensor(float)": "FLOAT", "tensor(float16)": "HALF", "tensor(int32)": "INT32"}
TYPES = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32}

Shape = tuple[int, ...]


class Broken(AssertionError):
    """A rule of TensorRT was broken."""


class DataType(enum.Enum):
    FLOAT, HALF, INT32, BF16 = range(4)


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(enum.Enum):
    DEVICE, HOST = range(2)


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class PluginRegistry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], object] = {}

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> object | None:
        return self.creators.get((type, version, plugin_namespace))


@dataclass
class Run:
    """One enqueued call."""

    engine: str
    profile: int
    shapes: dict[str, Shape]


@dataclass
class Engine:
    """trt.ICudaEngine"""

    name: str
    session: Any
    profiles: list[dict[str, list[list[int]]]]  # (min, opt, max) shape of every input with dynamic dimensions
    runs: list[Run]
    contexts: list[Context] = field(default_factory=list)
    aliased: bool = True

    def __post_init__(self) -> None:
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self.tensors = {**self.inputs, **self.outputs}

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    @property
    def device_memory_size_v2(self) -> int:
        return max(self.get_device_memory_size_for_profile_v2(index) for index in range(len(self.profiles)))

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return SCRATCH_PER_ROW * max(int(np.prod(ranges[2][:1])) for ranges in self.profiles[index].values())

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[KINDS[self.tensors[name].type]]

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def get_tensor_shape(self, name: str) -> list[int]:
        return [size if isinstance(size, int) else -1 for size in self.tensors[name].shape]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        return self.profiles[profile_index][name]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return name.replace("_cache_out.", "_cache.") if self.aliased and "_cache_out." in name else None

    def create_execution_context(self, strategy: Any) -> Context:
        if strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            raise Broken("every context with scratch memory of its own")
        self.contexts.append(Context(self))
        return self.contexts[-1]


class Context:
    """trt.IExecutionContext"""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.profile: int | None = None
        self.scratch = (0, 0)
        self.shapes: dict[str, Shape] = {
            name: tuple(value.shape) for name, value in engine.inputs.items() if -1 not in engine.get_tensor_shape(name)
        }
        self.addresses: dict[str, int] = {}
        self.refused: set[str] = set()

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if self.profile is not None:
            raise Broken("the profile of a context was switched")
        if any(other.profile == profile_index for other in self.engine.contexts):
            raise Broken("two contexts with one profile")
        self.profile = profile_index
        return STREAMS.get(stream_handle) is not None

    def set_device_memory(self, memory: int, size: int) -> None:
        if memory % ALIGNMENT:
            raise Broken("unaligned scratch")
        self.scratch = (memory, size)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        self.refused.add(name)
        if self.profile is None or name not in self.engine.inputs:
            return False
        if self._fits(name, tuple(shape)):
            self.refused.discard(name)
            self.shapes[name] = tuple(shape)
            return True
        return False

    def _fits(self, name: str, shape: Shape) -> bool:
        declared = self.engine.get_tensor_shape(name)
        if -1 not in declared:
            return list(shape) == declared
        assert self.profile is not None
        least, _, most = self.engine.profiles[self.profile][name]
        return len(shape) == len(declared) and all(
            low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
        )

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self.engine.tensors or memory % ALIGNMENT:
            return False
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        device = STREAMS[stream_handle]
        self._check_rules()
        device.view(*self.scratch)
        device.enqueue(Call(self, device))
        return True

    def _check_rules(self) -> None:
        if self.profile is None:
            raise Broken("no profile")
        if self.refused:
            raise Broken(f"ran after the shape of {self.refused} was refused")
        for name in self.engine.inputs:
            if name not in self.shapes:
                raise Broken(f"no shape of {name}")
        for name in self.engine.tensors:
            if name not in self.addresses:
                raise Broken(f"no address of {name}")
            source = self.engine.get_aliased_input_tensor(name)
            if source and self.addresses[name] != self.addresses[source]:
                raise Broken(f"{name} is not where {source} is")
        if self.scratch[1] < self.engine.get_device_memory_size_for_profile_v2(self.profile):
            raise Broken("too little scratch")


class Call:
    """One enqueued call, with the shapes and addresses of that moment."""

    def __init__(self, context: Context, device: HostDevice) -> None:
        assert context.profile is not None
        self.context, self.device = context, device
        self.run = Run(context.engine.name, context.profile, dict(context.shapes))
        self.addresses = dict(context.addresses)

    def check_replay(self) -> None:
        if self.run.shapes != self.context.shapes or self.addresses != self.context.addresses:
            raise Broken("a graph was replayed after its context went on to other shapes or addresses")

    def __call__(self) -> None:
        engine = self.context.engine
        engine.runs.append(self.run)
        execute(engine, self.device, self.run.shapes, self.addresses)


def execute(engine: Engine, device: HostDevice, shapes: dict[str, Shape], addresses: dict[str, int]) -> None:
    """Run the graph over device memory, caches in place."""
    sizes: dict[str, int] = {}
    for name, value in engine.inputs.items():
        for dim, size in zip(value.shape, shapes[name], strict=True):
            if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                raise Broken(f"{name}: {dim} is {size} here and {sizes[dim]} elsewhere")
    if "K_max" not in sizes and "tokens" in engine.outputs:
        sizes["K_max"] = sizes["B"] * (engine.outputs["tokens"].shape[1] + 1)
    binding = engine.session.io_binding()
    for name in engine.inputs:
        binding.bind_input(name, "cpu", 0, *_place(engine, device, name, shapes[name], addresses))
    for name, value in engine.outputs.items():
        shape = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in value.shape)
        binding.bind_output(name, "cpu", 0, *_place(engine, device, name, shape, addresses))
    engine.session.run_with_iobinding(binding)


def _place(
    engine: Engine, device: HostDevice, name: str, shape: Shape, addresses: dict[str, int]
) -> tuple[Any, Shape, int]:
    kind = TYPES[KINDS[engine.tensors[name].type]]
    device.view(addresses[name], int(np.prod(shape)) * np.dtype(kind).itemsize)
    return kind, shape, addresses[name]


class Runtime:
    """trt.Runtime"""

    def __init__(self, double: SimpleNamespace, logger: Any) -> None:
        self.double = double
        self.logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Engine | None:
        try:
            plan = json.loads(serialized_engine.removeprefix(TAG))
        except ValueError:
            self.logger.log(ILogger.ERROR, "this is no plan")
            return None
        for plugin in plan["plugins"]:
            if self.double.registry.get_creator(*plugin) is None:
                self.logger.log(ILogger.ERROR, "cannot deserialize a plugin")
                return None
        engine = Engine(plan["name"], session_of(Path(plan["graph"])), plan["profiles"], self.double.runs)
        engine.aliased = plan.get("aliased", True)
        self.double.engines[plan["name"]] = engine
        return engine


def session_of(graph: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def make_double(version: str = "11.4.0.106") -> Any:
    """The module. engines: by name, as they were loaded.  runs: every network call that was run.  registry: plugins."""
    double = SimpleNamespace(
        __version__=version,
        DataType=DataType,
        TensorIOMode=TensorIOMode,
        TensorLocation=TensorLocation,
        ExecutionContextAllocationStrategy=ExecutionContextAllocationStrategy,
        ILogger=ILogger,
        registry=PluginRegistry(),
        engines={},
        runs=[],
    )
    double.get_plugin_registry = lambda: double.registry
    double.Runtime = lambda logger: Runtime(double, logger)
    return double


def write_plan(path: Path, name: str, graph: Path, profiles: list[dict[str, Any]], plugins: list[list[str]]) -> None:
    content = {"name": name, "graph": str(graph), "profiles": profiles, "plugins": plugins}
    path.write_bytes(TAG + json.dumps(content).encode())
