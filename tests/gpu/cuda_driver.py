"""The few calls of the CUDA driver that a kernel check needs, by ctypes alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from numpy.typing import NDArray

COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
CAPTURE_MODE_THREAD_LOCAL = 1  # CUstreamCaptureMode

HANDLE = POINTER(c_void_p)
SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [HANDLE, c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuModuleLoadData": [HANDLE, c_char_p],
    "cuModuleGetFunction": [HANDLE, c_void_p, c_char_p],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemcpyHtoD_v2": [c_uint64, c_void_p, c_size_t],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuStreamCreate": [HANDLE, c_uint],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamBeginCapture_v2": [c_void_p, c_int],
    "cuStreamEndCapture": [c_void_p, HANDLE],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, HANDLE, HANDLE],
    "cuGraphInstantiateWithFlags": [HANDLE, c_void_p, c_uint64],
    "cuGraphLaunch": [c_void_p, c_void_p],
    "cuGraphExecDestroy": [c_void_p],
    "cuGraphDestroy": [c_void_p],
    "cuEventCreate": [HANDLE, c_uint],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventElapsedTime_v2": [POINTER(c_float), c_void_p, c_void_p],
}


class CudaError(Exception):
    """A driver call failed, or there is no driver or device."""


class Cuda:
    """The first device and one stream. All calls raise CudaError."""

    def __init__(self, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(f"no NVIDIA driver: {error}") from error
        for name, types in SIGNATURES.items():
            try:
                getattr(self._library, name).argtypes = types
            except AttributeError as error:
                raise CudaError(f"the NVIDIA driver is older than CUDA 12.8: it lacks {name}") from error
        self.call("cuInit", 0)
        device = self._out(c_int, "cuDeviceGet", 0)
        self.compute_capability = tuple(
            self._out(c_int, "cuDeviceGetAttribute", attribute, device)
            for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR)
        )
        self.cuda_version: int = self._out(c_int, "cuDriverGetVersion")
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, len(text), device)
        self.device_name = text.value.decode()
        self.call("cuCtxSetCurrent", self._out(c_void_p, "cuDevicePrimaryCtxRetain", device))
        # Not CU_STREAM_NON_BLOCKING: a copy to the device may still be under way when the call for it returns.
        self._stream = self._out(c_void_p, "cuStreamCreate", 0)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorString(code, byref(text))
            raise CudaError(f"{name}: error {code}, {(text.value or b'unknown').decode()}")

    def function(self, image: bytes, name: str) -> Any:
        """A kernel of a PTX or cubin image."""
        return self._out(c_void_p, "cuModuleGetFunction", self._out(c_void_p, "cuModuleLoadData", image), name.encode())

    def allocate(self, size: int) -> int:
        """Device address of `size` bytes."""
        address: int = self._out(c_uint64, "cuMemAlloc_v2", size)
        return address

    def write(self, address: int, array: NDArray[Any]) -> None:
        self.call("cuMemcpyHtoD_v2", address, array.ctypes.data, array.nbytes)

    def read(self, address: int, array: NDArray[Any]) -> None:
        """Fill `array` from device memory, after all that the stream has to do."""
        self.call("cuStreamSynchronize", self._stream)
        self.call("cuMemcpyDtoH_v2", array.ctypes.data, address, array.nbytes)

    def launch(self, function: Any, threads: int, arguments: list[c_uint64 | c_int]) -> None:
        """One block of a kernel."""
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        self.call("cuLaunchKernel", function, 1, 1, 1, threads, 1, 1, 0, self._stream, pointers, None)

    def graph_milliseconds(self, record: Callable[[], None], replays: int) -> list[float]:
        """Capture what `record` launches as a CUDA graph, and time each replay of it."""
        self.call("cuStreamBeginCapture_v2", self._stream, CAPTURE_MODE_THREAD_LOCAL)
        record()
        graph = self._out(c_void_p, "cuStreamEndCapture", after=(self._stream,))
        executable = self._out(c_void_p, "cuGraphInstantiateWithFlags", graph, 0)
        start, end = (self._out(c_void_p, "cuEventCreate", 0) for _ in range(2))
        elapsed = []
        for _ in range(replays):
            self.call("cuEventRecord", start, self._stream)
            self.call("cuGraphLaunch", executable, self._stream)
            self.call("cuEventRecord", end, self._stream)
            self.call("cuStreamSynchronize", self._stream)
            elapsed.append(float(self._out(c_float, "cuEventElapsedTime_v2", start, end)))
        self.call("cuGraphExecDestroy", executable)
        self.call("cuGraphDestroy", graph)
        return elapsed

    def _out(self, kind: Any, name: str, *arguments: Any, after: tuple[Any, ...] = ()) -> Any:
        """The value that a call writes through its first pointer, which stands behind the arguments in `after`."""
        value = kind()
        self.call(name, *after, byref(value), *arguments)
        return value.value
