"""An ONNX graph under construction, its weights streamed to one file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 24  # the first with TensorScatter, and with the Attention that reads a cache of static length
ALIGNMENT = 4096  # a page, so that runtimes can map weights instead of reading them

OnnxPrecision = Literal["fp32", "fp16", "bf16"]
ELEMENT_TYPES: dict[str, int] = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
}


class OnnxGraph:
    """Nodes, inputs and outputs by name. Use as a context manager: it holds the weight file open.

    A weight is converted and written as soon as it is asked for, so the peak is one tensor, not one model.
    """

    def __init__(self, name: str, path: Path, precision: OnnxPrecision) -> None:
        self.name = name
        self.path = path
        self.precision = precision
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self._nodes: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._data_path = path.with_name(f"{path.name}.data")
        self._data = self._data_path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._data.close()

    def input(self, name: str, kind: str, shape: Sequence[int | str]) -> str:
        """An input; a string dimension is dynamic."""
        self.inputs.append(helper.make_tensor_value_info(name, ELEMENT_TYPES[kind], shape))
        return name

    def output(self, name: str, value: str, kind: str, shape: Sequence[int | str]) -> None:
        """Let `value` leave the graph as `name`."""
        self.expose(self.node("Identity", [value], name=name), kind, shape)

    def expose(self, value: str, kind: str, shape: Sequence[int | str]) -> None:
        """Let `value` leave the graph under its own name."""
        self.outputs.append(helper.make_tensor_value_info(value, ELEMENT_TYPES[kind], shape))

    def node(self, op: str, inputs: Sequence[str], *, name: str = "", **attributes: Any) -> str:
        """The only output of a new node."""
        return self.nodes(op, inputs, 1, name=name, **attributes)[0]

    def nodes(self, op: str, inputs: Sequence[str], count: int, *, name: str = "", **attributes: Any) -> list[str]:
        """All `count` outputs of a new node."""
        name = name or f"{op}.{len(self._nodes)}"
        outputs = [name] if count == 1 else [f"{name}.{index}" for index in range(count)]
        self._nodes.append(helper.make_node(op, inputs, outputs, name, **attributes))
        return outputs

    def constant(self, values: object, kind: type[np.generic] = np.int64) -> str:
        """A small constant, kept in the model file and stored once."""
        array = np.asarray(values, kind)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constants[key] = f"constant.{len(self._constants)}"
            self._initializers[name] = numpy_helper.from_array(array, name)
        return self._constants[key]

    def cast(self, value: str, kind: str) -> str:
        return self.node("Cast", [value], to=ELEMENT_TYPES[kind])

    def weight(self, name: str, array: NDArray[Any]) -> str:
        """A tensor in the weight file: floats in the graph's precision, integers as they are."""
        if np.issubdtype(array.dtype, np.floating):
            array = array.astype(helper.tensor_dtype_to_np_dtype(ELEMENT_TYPES[self.precision]), copy=False)
        self._data.seek(-self._data.tell() % ALIGNMENT, 1)
        tensor = TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            dims=array.shape,
            data_location=TensorProto.EXTERNAL,
        )
        place = {"location": self._data_path.name, "offset": self._data.tell(), "length": array.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self._data.write(np.ascontiguousarray(array).view(np.uint8).data)
        self._initializers[name] = tensor
        return name

    def has(self, name: str) -> bool:
        """Whether a weight or constant of that name is stored."""
        return name in self._initializers

    def save(self) -> dict[str, list[str]]:
        """Write the model; returns its input and output names."""
        graph = helper.make_graph(
            self._nodes, self.name, self.inputs, self.outputs, initializer=list(self._initializers.values())
        )
        opset = helper.make_opsetid("", OPSET)
        model = helper.make_model(
            graph,
            opset_imports=[opset],
            ir_version=helper.find_min_ir_version_for([opset]),
            producer_name="dcut-trt",
        )
        self._data.flush()
        onnx.save_model(model, self.path)
        return {"inputs": [v.name for v in self.inputs], "outputs": [v.name for v in self.outputs]}
