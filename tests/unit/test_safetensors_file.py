"""safetensors files that are cut, overlap, or make no sense: refused before a tensor is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import encode, write_safetensors, write_safetensors_parts

from dcut_engines.safetensors_file import read_header, read_tensors
from dcut_trt.errors import DcutError, UnknownModel


def test_a_file_cut_or_grown_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": np.ones((4, 4), np.float32), "b": np.ones(3, np.float32)})
    whole = path.read_bytes()
    assert set(read_tensors(tmp_path)) == {"a", "b"}
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UnknownModel, match="not a readable safetensors file"):
            read_header(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(UnknownModel, match="tensors end at byte"):
        read_header(path)


@pytest.mark.parametrize(
    ("begin", "end", "message"),
    [
        (0, 16, "starts at byte 0"),  # over the first tensor
        (12, 28, "starts at byte 12"),  # over a part of it
        (24, 40, "starts at byte 24"),  # a gap
        (16, 40, "takes 16 bytes, its offsets span 24"),
        (16, 2**60, "its offsets span"),
        (-16, 0, "offsets"),
        (16.0, 32.0, "offsets"),
        ("16", "32", "not a readable"),
    ],
)
def test_offsets_that_overlap_leave_gaps_or_leave_the_file(tmp_path: Path, begin: Any, end: Any, message: str) -> None:
    values = np.ones(4, np.float32)
    header = {
        "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [4], "data_offsets": [begin, end]},
    }
    write_safetensors_parts(tmp_path / "model.safetensors", header, encode(values, "F32") * 2)
    with pytest.raises(UnknownModel, match=message):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "header",
    [[], "x", {"a": 1}, {"a": {}}, {"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}]
    + [{"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}} for shape in ([-1], ["1"], 1, [[1]], [2**70])],
)
def test_headers_that_make_no_sense(tmp_path: Path, header: Any) -> None:
    write_safetensors_parts(tmp_path / "model.safetensors", header, bytes(4))
    with pytest.raises(DcutError):
        read_header(tmp_path / "model.safetensors")
