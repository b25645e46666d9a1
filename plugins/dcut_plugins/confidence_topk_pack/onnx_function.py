"""The node as a model-local ONNX function: what ONNX Runtime runs, and TensorRT too where it has no plugin.

Ranks come from comparing every pair of candidates, not from TopK: ties then do not depend on a runtime's sort, and
TensorRT's limit on TopK does not apply. NaN meets no comparisons but Greater and Less, which are false for it on all
runtimes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dcut_plugins.confidence_topk_pack.contract import DOMAIN, INPUTS, NAME, OUTPUTS, VERSION, check_limits
from dcut_trt.errors import UnsupportedOption

FROM_DRAFTER = INPUTS[:3]  # tokens, confidence and anchors: a drafter graph has them


def attach_pack(model: onnx.ModelProto, budgets: int, max_batch: int) -> None:
    """Append the node to a drafter graph, so that the packed rows leave it under the names of the target's inputs.

    The graph has an input `anchors` [B] and outputs `tokens`, `confidence` [B, D], which stay outputs. It gains the
    inputs anchor_positions [B], budgets [R], cost_ms [R], bypass [1] (contract.PackInputs) and the outputs of
    contract.Packed. budgets: R.  max_batch: the largest B it will run.
    Raises UnsupportedOption when the node cannot serve that, or the graph is not a drafter's.
    """
    graph = model.graph
    values = {value.name: value for value in (*graph.input, *graph.output)}
    taken = {name for node in graph.node for name in node.output} | set(values)
    missing, clashing = set(FROM_DRAFTER) - set(values), ({*INPUTS, *OUTPUTS} - set(FROM_DRAFTER)) & taken
    if missing or clashing:
        raise UnsupportedOption(f"not a drafter graph: lacks {sorted(missing)}, has {sorted(clashing)} already")
    length = values["tokens"].type.tensor_type.shape.dim[1].dim_value
    check_limits(max_batch, length, budgets)

    graph.input.extend(value_infos(INPUTS[3:], length, budgets))
    graph.output.extend(value_infos(OUTPUTS, length, budgets))
    graph.node.append(pack_node())
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    model.functions.append(pack_function(opset))
    model.opset_import.append(helper.make_opsetid(DOMAIN, int(VERSION)))


def pack_node() -> onnx.NodeProto:
    """The attributes name the plugin for TensorRT's parser, which takes it where its creator is registered."""
    attributes = {"plugin_namespace": DOMAIN, "plugin_version": VERSION}
    return helper.make_node(NAME, INPUTS, OUTPUTS, NAME, domain=DOMAIN, **attributes)


def value_infos(names: Sequence[str], length: int, budgets: int) -> list[onnx.ValueInfoProto]:
    """Types and shapes of inputs and outputs; the batch is dynamic."""
    shapes: dict[str, tuple[str | int, ...]] = {
        **dict.fromkeys(("tokens", "confidence"), ("B", length)),
        **dict.fromkeys(("anchors", "anchor_positions", "keep"), ("B",)),
        **dict.fromkeys(("budgets", "cost_ms"), (budgets,)),
        **dict.fromkeys(("bypass", "bucket"), (1,)),
        "subsequence_begins": ("B_plus_1",),
        **dict.fromkeys(("token_ids", "request_rows", "depths", "positions"), ("K_max",)),
    }
    floats = {"confidence", "cost_ms"}
    kinds = {name: TensorProto.FLOAT if name in floats else TensorProto.INT32 for name in names}
    return [helper.make_tensor_value_info(name, kinds[name], shapes[name]) for name in names]


def pack_function(opset: int) -> onnx.FunctionProto:
    """The function in the opset of its model; candidates are depth-major, as in dcut_trt.spec.selector.rank."""
    body = _Body()
    batch, length = body.size("tokens", 0), body.size("tokens", 1)
    block = body.op("Add", length, body.i32(1))
    count = body.op("Mul", batch, block)

    scores = _scores(body)  # [N]
    candidates = body.indices(count)  # [N]
    kept, size = _choose(body, scores, candidates, batch, count)

    by_request = body.op("Reshape", kept, body.concat(block, batch))  # i32 [D + 1, B]
    lengths = body.op("ReduceSum", by_request, body.i64([0]), keepdims=0)  # [B]
    body.op("Sub", lengths, body.i32(1), name="keep")
    requests = body.indices(batch)
    bounds = body.indices(body.op("Add", batch, body.i32(1)))
    before = body.op("Less", body.row(requests), body.column(bounds))  # [B + 1, B]
    before = body.op("Mul", body.cast(before, TensorProto.INT32), body.row(lengths))
    body.op("ReduceSum", before, body.i64([1]), keepdims=0, name="subsequence_begins")

    ends = body.op("Slice", "subsequence_begins", body.i64([1]), body.i64([np.iinfo(np.int64).max]))
    passed = body.op("Less", body.row(ends), body.column(body.op("Add", candidates, body.i32(1))))  # [K_max, B]
    row = body.op("ReduceSum", body.cast(passed, TensorProto.INT32), body.i64([1]), keepdims=0)
    valid = body.op("Less", candidates, size)  # [K_max]
    body.op("Where", valid, row, body.i32(0), name="request_rows")
    depth = body.op("Sub", candidates, body.op("Gather", "subsequence_begins", "request_rows"))
    body.op("Where", valid, depth, body.i32(0), name="depths")

    blocks = body.op("Concat", body.column("anchors"), "tokens", axis=1)  # [B, D + 1]
    cell = body.op("Add", body.op("Mul", "request_rows", block), "depths")
    token = body.op("Gather", body.op("Reshape", blocks, body.i64([-1])), cell)
    body.op("Where", valid, token, body.i32(0), name="token_ids")
    position = body.op("Add", body.op("Gather", "anchor_positions", "request_rows"), "depths")
    body.op("Where", valid, position, body.i32(0), name="positions")
    attributes = ["plugin_namespace", "plugin_version"]
    return helper.make_function(DOMAIN, NAME, INPUTS, OUTPUTS, body.nodes, [helper.make_opsetid("", opset)], attributes)


def _scores(body: _Body) -> str:
    """Log prefix scores [N] of all candidates, the anchors' zeros first."""
    known = body.op("Greater", "confidence", body.f32(0))
    clipped = body.op("Min", body.op("Where", known, "confidence", body.f32(0)), body.f32(1))
    drafts = body.op("CumSum", body.op("Log", clipped), body.i64(1))  # [B, D]
    zeros = body.cast(body.op("Mul", body.column("anchors"), body.i32(0)), TensorProto.FLOAT)
    scores = body.op("Concat", zeros, drafts, axis=1)  # [B, D + 1]
    return body.op("Reshape", body.op("Transpose", scores, perm=[1, 0]), body.i64([-1]))


def _choose(body: _Body, scores: str, candidates: str, batch: str, count: str) -> tuple[str, str]:
    """Writes bucket; returns which candidates are kept, i32 [N], and how many, i32 [1]."""
    better = body.op("Greater", body.row(scores), body.column(scores))  # [N, N], of column over row
    equal = body.op("Equal", body.row(scores), body.column(scores))
    earlier = body.op("Less", body.row(candidates), body.column(candidates))
    ahead = body.op("Or", better, body.op("And", equal, earlier))
    ranks = body.op("ReduceSum", body.cast(ahead, TensorProto.INT32), body.i64([1]), keepdims=0)  # [N]

    budgets = body.op("Min", body.op("Max", "budgets", batch), count)  # [R]
    within = body.cast(body.op("Less", body.row(ranks), body.column(budgets)), TensorProto.FLOAT)  # [R, N]
    expected = body.op("Mul", within, body.row(body.op("Exp", scores)))
    expected = body.op("ReduceSum", expected, body.i64([1]), keepdims=0)
    usable = body.op("And", body.op("Greater", "cost_ms", body.f32(0)), body.op("Less", "cost_ms", body.f32(np.inf)))
    utilities = body.op("Div", expected, body.op("Where", usable, "cost_ms", body.f32(1)))
    utilities = body.op("Where", usable, utilities, body.f32(0))
    best = body.op("ReduceMax", utilities, keepdims=1)  # [1]
    # Less, for best is at least every utility: "not less" is "equal to the best", and NaN cannot occur any more.
    chosen = body.op("And", usable, body.op("Not", body.op("Less", utilities, best)))
    ratios = body.size("budgets", 0)
    last = body.op("Sub", ratios, body.i32(1))
    first = body.op("ReduceMin", body.op("Where", chosen, body.indices(ratios), last), keepdims=1)  # [1]
    bypassed = body.op("Not", body.op("Equal", "bypass", body.i32(0)))  # [1]
    body.op("Where", bypassed, ratios, first, name="bucket")
    size = body.op("Where", bypassed, batch, body.op("Gather", budgets, first))
    return body.cast(body.op("Less", ranks, size), TensorProto.INT32), size


class _Body:
    """Nodes of a function under construction. Sizes are i32 [1]."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        output = name or f"{kind}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def i32(self, values: object) -> str:
        return self._constant(values, np.int32)

    def i64(self, values: object) -> str:
        return self._constant(values, np.int64)

    def f32(self, values: object) -> str:
        return self._constant(values, np.float32)

    def _constant(self, values: object, kind: type[np.generic]) -> str:
        return self.op("Constant", value=numpy_helper.from_array(np.asarray(values, kind)))

    def cast(self, value: str, kind: int) -> str:
        return self.op("Cast", value, to=kind)

    def size(self, value: str, axis: int) -> str:
        """One dimension of a value."""
        return self.cast(self.op("Shape", value, start=axis, end=axis + 1), TensorProto.INT32)

    def concat(self, *sizes: str) -> str:
        """Sizes as a shape."""
        return self.cast(self.op("Concat", *sizes, axis=0), TensorProto.INT64)

    def indices(self, size: str) -> str:
        """0 .. size - 1, i32. The range itself is i64: ONNX Runtime takes a static size for one, whatever its type."""
        end = self.op("Squeeze", self.cast(size, TensorProto.INT64), self.i64([0]))
        return self.cast(self.op("Range", self.i64(0), end, self.i64(1)), TensorProto.INT32)

    def row(self, vector: str) -> str:
        return self.op("Unsqueeze", vector, self.i64([0]))

    def column(self, vector: str) -> str:
        return self.op("Unsqueeze", vector, self.i64([1]))
