"""What a plan will be compiled from, read from the ONNX file itself and checked before TensorRT sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

from dcut_engines.onnx_graph import ELEMENT_TYPES
from dcut_engines.tensorrt_profiles import GraphInput, PlanError
from dcut_plugins.confidence_topk_pack.onnx_function import attach_pack

ATTENTION_INPUTS = 4  # query, key, value and mask; TensorRT's parser drops the others without a word
TOPK_LIMIT = 3840  # TensorRT's own, of K in its TopK layer
KIND_OF = {element: kind for kind, element in ELEMENT_TYPES.items()}


def read_inputs(path: Path, precision: str) -> tuple[GraphInput, ...]:
    """The inputs of an ONNX graph. Raises PlanError for what TensorRT would refuse, or compute in another precision."""
    model = onnx.load(path, load_external_data=False)
    inputs = tuple(_graph_input(value) for value in model.graph.input)
    _check_kinds(inputs, precision)
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    _check_attention(nodes)
    _check_topk(nodes, {tensor.name: tensor for tensor in model.graph.initializer})
    return inputs


def check_network_inputs(inputs: Sequence[GraphInput], network: Iterable[tuple[str, str]]) -> None:
    """Raise PlanError unless TensorRT's network has the graph's inputs; network: their (name, kind)."""
    found, wanted = dict(network), {graph_input.name: graph_input.kind for graph_input in inputs}
    for name, kind in wanted.items():
        if name not in found:
            raise PlanError(f"input {name}: TensorRT's parser dropped it; nothing in the graph depends on it")
        if found[name] != kind:
            raise PlanError(f"input {name}: {kind} in the graph, {found[name]} after parsing")
    for name in found.keys() - wanted.keys():
        raise PlanError(f"input {name}: TensorRT's parser added it")


def _graph_input(value: Any) -> GraphInput:
    tensor = value.type.tensor_type
    kind = KIND_OF.get(tensor.elem_type, onnx.TensorProto.DataType.Name(tensor.elem_type).lower())
    dims = tuple(dim.dim_param if dim.HasField("dim_param") else int(dim.dim_value) for dim in tensor.shape.dim)
    return GraphInput(value.name, kind, dims)


def _check_kinds(inputs: Sequence[GraphInput], precision: str) -> None:
    floats = {kind for kind in ELEMENT_TYPES if not kind.startswith("i")}
    for graph_input in inputs:
        # A cost is a measurement, not an activation: fp32 in every build.
        if graph_input.name != "cost_ms" and graph_input.kind in floats - {precision}:
            raise PlanError(f"input {graph_input.name}: {graph_input.kind}, and the build is {precision}")


def _check_attention(nodes: Sequence[Any]) -> None:
    for node in nodes:
        extra = [name for name in node.input[ATTENTION_INPUTS:] if name]
        if node.op_type == "Attention" and extra:
            raise PlanError(
                f"node {node.name}: TensorRT's parser drops all inputs past its first {ATTENTION_INPUTS}: {extra[0]}"
            )


def _check_topk(nodes: Sequence[Any], constants: dict[str, Any]) -> None:
    for node in nodes:
        if node.op_type == "Constant":
            constants.update((node.output[0], kept.t) for kept in node.attribute if kept.name == "value")
    for node in nodes:
        if node.op_type != "TopK" or node.input[1] not in constants:
            continue
        wanted = int(numpy_helper.to_array(constants[node.input[1]]).max())
        if wanted > TOPK_LIMIT:
            name = node.name or node.output[0]
            raise PlanError(f"node {name}: TopK with K = {wanted}; TensorRT's limit is {TOPK_LIMIT}")


def append_pack(path: Path, budgets: int, max_batch: int) -> dict[str, list[str]]:
    """Put the pack node at the tail of a drafter graph, in its file; returns the names of all inputs and outputs.

    budgets: R, one per ratio.  Raises UnsupportedOption when the node cannot serve so many candidates or budgets.
    """
    model = onnx.load(path, load_external_data=False)
    attach_pack(model, budgets, max_batch)
    onnx.save_model(model, path)
    graph = model.graph
    return {"inputs": [value.name for value in graph.input], "outputs": [value.name for value in graph.output]}
