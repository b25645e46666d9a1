"""What stands in the emitted ONNX files: valid models of the named ops, strongly typed, weights outside."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from dflash_reference import tiny_drafter
from tiny_targets import tiny_llama, tiny_qwen3
from window_runner import WindowRunner

from dcut_engines.emit_onnx import emit_drafter, emit_target
from dcut_engines.onnx_graph import ELEMENT_TYPES, OnnxPrecision

PRECISIONS: tuple[OnnxPrecision, ...] = ("fp32", "fp16", "bf16")
LAYER_OPS = ("RMSNormalization", "RotaryEmbedding", "TensorScatter", "Attention")
# Layers, then the plain ops of the network, then those that index, shape and compare, in TensorRT's op set all of them.
VOCABULARY = {
    *(*LAYER_OPS, "MatMul", "Gather", "Transpose", "Concat"),
    *("Add", "Mul", "Sigmoid", "TopK", "Sub", "Exp", "ReduceSum", "Reciprocal"),
    *("Reshape", "Unsqueeze", "Squeeze", "Slice", "Shape", "Range", "Cast", "Identity"),
    *("Min", "Less", "LessOrEqual", "Where"),
}


def ops_of(model: Any) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def shapes_of(model: Any) -> dict[str, list[int | str]]:
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    values = [*graph.input, *graph.output, *graph.value_info]
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


def emit_tiny_target(tmp_path: Path, precision: OnnxPrecision, *, qwen3: bool = True, window: int | None = 8) -> Path:
    target, path = tiny_qwen3() if qwen3 else tiny_llama(), tmp_path / "target.onnx"
    emit_target(target.config, target.weights, (0, 2), precision, 128, path, max_len=64, window=window)
    return path


@pytest.mark.parametrize("window", [8, None], ids=["static", "dynamic"])
@pytest.mark.parametrize("qwen3", [True, False], ids=["qwen3", "llama"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_target_is_valid_and_made_of_the_named_ops(
    tmp_path: Path, precision: OnnxPrecision, qwen3: bool, window: int | None
) -> None:
    path = emit_tiny_target(tmp_path, precision, qwen3=qwen3, window=window)
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path, load_external_data=False)
    counts = ops_of(model)
    norms = 4 if qwen3 else 2
    assert [counts[op] for op in LAYER_OPS] == [3 * norms + 1, 3 * 2, 3 * 2, 3]
    assert set(counts) <= VOCABULARY
    assert counts["LessOrEqual"] == 1  # the mask is built once per step, not once per layer
    assert model.opset_import[0].version == 24


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_drafter_is_valid_and_made_of_the_named_ops(tmp_path: Path, precision: OnnxPrecision, causal: bool) -> None:
    drafter, path = tiny_drafter(causal=causal), tmp_path / "drafter.onnx"
    borrowed = (drafter.config, drafter.weights, drafter.embedding, drafter.head[:9], np.arange(9, dtype=np.int32))
    emit_drafter(*borrowed, precision, 128, path, max_len=64)
    onnx.checker.check_model(path, full_check=True)
    counts = ops_of(onnx.load(path, load_external_data=False))
    assert [counts[op] for op in LAYER_OPS] == [2 * 4 + 2, 2 * 2, 2 * 2, 2]
    assert set(counts) <= VOCABULARY
    assert counts["LessOrEqual"] == 1


def test_everything_but_attention_sees_only_packed_rows(tmp_path: Path) -> None:
    model = onnx.load(emit_tiny_target(tmp_path, "fp32"))
    shapes = shapes_of(model)
    for node in model.graph.node:
        if node.op_type in ("MatMul", "RMSNormalization", "Sigmoid"):
            assert shapes[node.output[0]][0] in ("K", "H"), node.name
        if node.op_type == "Attention":
            assert shapes[node.output[0]][1:] == [4, 8, 16]  # of every request, the heads over a window


@pytest.mark.parametrize("precision", PRECISIONS)
def test_types_at_the_border(tmp_path: Path, precision: OnnxPrecision) -> None:
    graph = onnx.load(emit_tiny_target(tmp_path, precision), load_external_data=False).graph
    types = {value.name: value.type.tensor_type.elem_type for value in [*graph.input, *graph.output]}
    assert types["logits"] == ELEMENT_TYPES["fp32"]
    assert types["features"] == types["key_cache.0"] == types["value_cache_out.2"] == ELEMENT_TYPES[precision]
    assert {types[name] for name in ("token_ids", "write_indices", "argmax")} == {ELEMENT_TYPES["i32"]}


def test_cache_lengths_are_static_and_each_output_is_the_update_itself(tmp_path: Path) -> None:
    model = onnx.load(emit_tiny_target(tmp_path, "fp16", window=None), load_external_data=False)
    shapes = shapes_of(model)
    updates = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "TensorScatter"}
    caches = [value.name for value in model.graph.input if "_cache." in value.name]
    assert updates == {name.replace("_cache.", "_cache_out."): name for name in caches}
    assert {tuple(shapes[name]) for name in (*updates, *caches)} == {("B", 2, 64, 16)}


def test_weights_stand_in_their_own_file_on_page_borders(tmp_path: Path) -> None:
    path = emit_tiny_target(tmp_path, "fp16", qwen3=False)
    places = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in onnx.load(path, load_external_data=False).graph.initializer
        if tensor.external_data
    }
    assert all(
        place["location"] == "target.onnx.data" and int(place["offset"]) % 4096 == 0 for place in places.values()
    )
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    weights = tiny_llama().weights
    np.testing.assert_array_equal(stored["model.norm.weight"], weights["model.norm.weight"].astype(np.float16))
    np.testing.assert_array_equal(stored["lm_head.weight.T"], weights["lm_head.weight"].T.astype(np.float16))


def test_the_same_network_gives_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for name in ("once", "twice"):
        (tmp_path / name).mkdir()
        path = emit_tiny_target(tmp_path / name, "bf16")
        files.append((path.read_bytes(), path.with_name("target.onnx.data").read_bytes()))
    assert files[0] == files[1]


def test_half_precision_computes_the_same_to_its_own_rounding(tmp_path: Path) -> None:
    target = tiny_qwen3()
    tokens = [5, 9, 2, 60, 33]
    outputs = WindowRunner(emit_tiny_target(tmp_path, "fp16"), 1).target([tokens], [0])
    logits, _ = target.reference(tokens)
    assert outputs["logits"].dtype == np.float32
    np.testing.assert_allclose(outputs["logits"], logits, atol=0.02 * np.abs(logits).max())
