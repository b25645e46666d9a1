"""GGUF container: metadata and tensor table of one file, read with every length checked against the file's size."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dcut_trt.errors import UnknownModel, UnsupportedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
# Metadata value types of the GGUF specification, by id; 8 is a string and 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table. shape is row-major (outermost first); offset is from the start of the file."""

    shape: tuple[int, ...]
    quantization: str
    offset: int
    size: int


class _Reader:
    """A cursor over the file's bytes that refuses to read past their end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise ValueError(f"{size} bytes wanted at offset {self.at}, the file ends at {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return str(self.take(self.scalar("Q")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise ValueError(f"metadata value of unknown type {kind} at offset {self.at}")
        return self._array(self.scalar("I"), self.scalar("Q"))

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in SCALARS:
            code = SCALARS[kind]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))
        if kind != STRING:
            raise ValueError(f"metadata array of unsupported type {kind} at offset {self.at}")
        # Every string takes at least its 8-byte length, so a wild count fails before the loop starts.
        if count * 8 > len(self.data) - self.at:
            raise ValueError(f"an array of {count} strings at offset {self.at} does not fit in the file")
        return [self.string() for _ in range(count)]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata by key, and the tensor table by GGUF's own tensor names."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def dequantize(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32, in its row-major shape.

        Raises UnsupportedModel for a quantization that the gguf package cannot expand.
        """
        from gguf import GGMLQuantizationType  # noqa: PLC0415
        from gguf.quants import dequantize  # noqa: PLC0415

        tensor = self.tensors[name]
        raw = np.fromfile(self.path, dtype=np.uint8, count=tensor.size, offset=tensor.offset)
        try:
            values = dequantize(raw, GGMLQuantizationType[tensor.quantization])
        except NotImplementedError as error:
            raise UnsupportedModel(f"{self.path}: tensor {name} is {tensor.quantization}: {error}") from error
        return cast("NDArray[np.float32]", values.astype(np.float32, copy=False).reshape(tensor.shape))


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of a GGUF file; tensor data stays on disk.

    Raises UnknownModel when the file is not GGUF, is truncated, or its tensors overlap or leave the file.
    """
    try:
        data = memoryview(np.memmap(path, dtype=np.uint8, mode="r"))  # type: ignore[arg-type]
        return _parse(path, data)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise UnknownModel(f"{path} is not a readable GGUF file: {error}") from error


def _parse(path: Path, data: memoryview) -> GgufFile:
    reader = _Reader(data)
    if bytes(reader.take(4)) != MAGIC:
        raise ValueError(f"it starts with {bytes(data[:4])!r} instead of {MAGIC!r}")
    version = reader.scalar("I")
    if version not in VERSIONS:
        raise ValueError(f"version {version}; versions {VERSIONS} can be read")
    tensor_count, field_count = reader.scalar("Q"), reader.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        key = reader.string()
        if key in metadata:
            raise ValueError(f"metadata key {key} is there twice")
        metadata[key] = reader.value(reader.scalar("I"))
    entries = [_tensor_entry(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={alignment!r} is not a power of two")
    start = -(-reader.at // alignment) * alignment
    return GgufFile(path, metadata, dict(_place(entries, start, len(data))))


def _tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = reader.string(), reader.scalar("I")
    if dimensions > MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {dimensions} dimensions; the format allows {MAX_DIMENSIONS}")
    # GGUF lists the innermost dimension first.
    shape = tuple(reversed([reader.scalar("Q") for _ in range(dimensions)]))
    return name, shape, reader.scalar("I"), reader.scalar("Q")


def _place(
    entries: list[tuple[str, tuple[int, ...], int, int]], start: int, end: int
) -> Iterator[tuple[str, GgufTensor]]:
    """Give every tensor its place in the file, in file order; names must be unique and places disjoint."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415

    names = [name for name, *_ in entries]
    if len(set(names)) != len(names):
        raise ValueError("a tensor name is there twice")
    free_from = start
    for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
        quantization = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        elements = 1
        for dimension in shape:
            elements *= dimension
        if elements == 0 or not shape or shape[-1] % block:
            raise ValueError(f"tensor {name} of shape {shape} is not made of {quantization.name} blocks of {block}")
        tensor = GgufTensor(shape, quantization.name, start + offset, elements // block * block_bytes)
        if tensor.offset < free_from:
            raise ValueError(f"tensor {name} at offset {tensor.offset} overlaps the one before it")
        free_from = tensor.offset + tensor.size
        if free_from > end:
            raise ValueError(f"tensor {name} needs bytes up to {free_from}, the file ends at {end}")
        yield name, tensor
