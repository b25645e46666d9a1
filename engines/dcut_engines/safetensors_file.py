"""Tensors of one or many safetensors files, read lazily and with every offset checked before use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcut_engines.hf_config import read_json
from dcut_trt.errors import UnknownModel, UnsupportedModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """Where one tensor lies: dtype F32, F16 or BF16; offset in bytes from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> NDArray[np.float32]:
        """The values as float32."""
        count = int(np.prod(self.shape, dtype=np.int64))
        raw = np.fromfile(self.path, dtype=STORED[self.dtype], count=count, offset=self.offset)
        widened = raw.astype(np.uint32) << 16 if self.dtype == "BF16" else raw.astype(np.float32, copy=False)
        values: NDArray[np.float32] = widened.view(np.float32)
        return values.reshape(self.shape)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, index first when it is sharded.

    Raises UnknownModel when there are none or a shard is missing.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        raise UnknownModel(f"{directory}: neither {SINGLE} nor {INDEX} is there")
    shards = [directory / name for name in sorted(set(_weight_map(directory).values()))]
    for shard in shards:
        if not shard.is_file():
            raise UnknownModel(f"{directory}: {INDEX} names {shard.name}, which is missing")
    return [directory / INDEX, *shards]


def read_tensors(directory: Path) -> dict[str, SafeTensor]:
    """The tensor table of a checkpoint directory.

    Raises UnknownModel for a truncated or inconsistent file, UnsupportedModel for a dtype other than F32, F16, BF16.
    """
    files = weight_files(directory)
    tables = {file.name: read_header(file) for file in files if file.name != INDEX}
    if files[0].name != INDEX:
        return tables[SINGLE]
    tensors = {}
    for name, shard in _weight_map(directory).items():
        if name not in tables[shard]:
            raise UnknownModel(f"{directory}: {INDEX} places {name} in {shard}, which does not hold it")
        tensors[name] = tables[shard][name]
    return tensors


def read_header(path: Path) -> dict[str, SafeTensor]:
    """The tensor table of one file, in file order; tensors must fill the data exactly, without overlap or gap."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {header_bytes} bytes does not fit in {size} bytes")
            header = json.loads(file.read(header_bytes))
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
        header.pop("__metadata__", None)
        return _place(path, header, 8 + header_bytes, size)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnknownModel(f"{path} is not a readable safetensors file: {error}") from error


def _place(path: Path, header: dict[str, Any], start: int, size: int) -> dict[str, SafeTensor]:
    tensors: dict[str, SafeTensor] = {}
    filled = 0
    for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if dtype not in ITEM_BYTES:
            raise UnsupportedModel(f"{path}: tensor {name} is {dtype}; supported are {', '.join(ITEM_BYTES)}")
        if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
            raise ValueError(f"tensor {name} has shape {list(shape)} and offsets {[begin, end]}")
        if begin != filled:
            raise ValueError(f"tensor {name} starts at byte {begin} of the data, the one before it ends at {filled}")
        wanted = int(np.prod(shape, dtype=object)) * ITEM_BYTES[dtype]
        if end - begin != wanted:
            raise ValueError(
                f"tensor {name} {dtype} {list(shape)} takes {wanted} bytes, its offsets span {end - begin}"
            )
        tensors[name] = SafeTensor(path, dtype, shape, start + begin)
        filled = end
    if start + filled != size:
        raise ValueError(f"its tensors end at byte {start + filled}, the file at {size}")
    return tensors


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnknownModel(f"{directory / INDEX}: weight_map is missing")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise UnknownModel(f"{directory / INDEX}: weight_map[{name!r}]={shard!r} is not a file name")
    return weight_map
