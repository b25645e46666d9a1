"""Device memory and the stream on CUDA. torch allocates, copies, gathers and captures; it computes nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcut_trt.backends.tensorrt_device import Buffer, Bytes, Graph
from dcut_trt.errors import EngineMismatch


@dataclass(frozen=True, slots=True, eq=False)
class CudaBuffer:
    """A range of a tensor of bytes."""

    tensor: Any

    @property
    def address(self) -> int:
        return int(self.tensor.data_ptr())

    @property
    def nbytes(self) -> int:
        return int(self.tensor.numel())

    def part(self, start: int, nbytes: int) -> CudaBuffer:
        assert 0 <= start <= start + nbytes <= self.nbytes, "outside of the buffer"
        return CudaBuffer(self.tensor[start : start + nbytes])


class CudaDevice:
    """The first CUDA device, and one stream of its own. Has never run: no machine of ours has had a GPU yet."""

    def __init__(self) -> None:
        """Raises EngineMismatch without torch or without a GPU."""
        try:
            torch = importlib.import_module("torch")
        except ModuleNotFoundError:
            raise EngineMismatch("TensorRT needs torch for device memory: pip install torch") from None
        if not torch.cuda.is_available():
            raise EngineMismatch("this machine has no CUDA device that torch can use")
        self._torch = torch
        self._place = "cuda"
        self._stream = torch.cuda.Stream()
        self.stream = int(self._stream.cuda_stream)
        self.name = str(torch.cuda.get_device_name())
        self.compute_capability = ".".join(map(str, torch.cuda.get_device_capability()))

    def free_bytes(self) -> int:
        return int(self._torch.cuda.mem_get_info()[0])

    def allocate(self, nbytes: int) -> CudaBuffer:
        with self._torch.cuda.stream(self._stream):
            return CudaBuffer(self._torch.zeros(nbytes, dtype=self._torch.uint8, device=self._place))

    def pinned(self, nbytes: int) -> Bytes:
        memory: Bytes = self._torch.zeros(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy()
        return memory

    def upload(self, to: Buffer, source: Bytes) -> None:
        self._copy(_tensor(to), self._torch.from_numpy(source))

    def download(self, to: Bytes, source: Buffer) -> None:
        self._copy(self._torch.from_numpy(to), _tensor(source))

    def clear(self, buffer: Buffer) -> None:
        with self._torch.cuda.stream(self._stream):
            _tensor(buffer).zero_()

    def move_columns(self, buffer: Buffer, pitch: int, source: int, to: int, nbytes: int) -> None:
        table = _tensor(buffer).view(-1, pitch)
        self._copy(table[:, to : to + nbytes], table[:, source : source + nbytes])

    def gather(self, to: Buffer, source: Buffer, rows: Buffer, width: int) -> None:
        torch = self._torch
        element = torch.int32 if width % 4 == 0 else torch.int16
        whole = _tensor(source)[: source.nbytes // width * width]
        with torch.cuda.stream(self._stream):
            torch.index_select(
                whole.view(element).view(-1, width // element.itemsize),
                0,
                _tensor(rows).view(torch.int32),
                out=_tensor(to).view(element).view(-1, width // element.itemsize),
            )

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.stream(self._stream):
            # Other threads of the server do not use CUDA, and what they do must not end a capture.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return _CudaGraph(self._torch, self._stream, graph)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _copy(self, to: Any, source: Any) -> None:
        with self._torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    torch: Any
    stream: Any
    graph: Any

    def replay(self) -> None:
        with self.torch.cuda.stream(self.stream):
            self.graph.replay()


def _tensor(buffer: Buffer) -> Any:
    assert isinstance(buffer, CudaBuffer)
    return buffer.tensor
