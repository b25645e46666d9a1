"""What this backend uses of TensorRT's Python, the same in tensorrt and tensorrt_rtx; a test holds it to the bindings.

No file imports either package: their module comes in as a value, from tensorrt.open_runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Context(Protocol):
    """trt.IExecutionContext"""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...

    def set_device_memory(self, memory: int, size: int) -> None: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def set_tensor_address(self, name: str, memory: int) -> bool: ...

    def execute_async_v3(self, stream_handle: int) -> bool: ...


class Engine(Protocol):
    """trt.ICudaEngine"""

    @property
    def num_io_tensors(self) -> int: ...

    @property
    def num_optimization_profiles(self) -> int: ...

    @property
    def device_memory_size_v2(self) -> int: ...

    def get_tensor_name(self, index: int) -> str: ...

    def get_tensor_mode(self, name: str) -> Any: ...

    def get_tensor_dtype(self, name: str) -> Any: ...

    def get_tensor_location(self, name: str) -> Any: ...

    def get_tensor_shape(self, name: str) -> Sequence[int]: ...

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> Sequence[Sequence[int]]: ...

    def get_aliased_input_tensor(self, name: str) -> str | None: ...

    def create_execution_context(self, strategy: Any) -> Context | None: ...


class Runtime(Protocol):
    """trt.Runtime"""

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Engine | None: ...


class PluginRegistry(Protocol):
    """trt.IPluginRegistry"""

    def get_creator(self, type: str, version: str, plugin_namespace: str) -> object | None: ...


# Enumerators, by the name of their enum.
CONSTANTS = {
    "ExecutionContextAllocationStrategy": ("USER_MANAGED",),
    "TensorIOMode": ("INPUT", "OUTPUT"),
    "TensorLocation": ("DEVICE",),
    "DataType": ("INT32", "FLOAT", "HALF", "BF16"),
}
