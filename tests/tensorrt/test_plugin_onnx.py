"""The node's ONNX function under ONNX Runtime against the reference, alone and at the tail of a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from gpu.pack_cases import LARGEST, SHAPES, exact_cases, make_case, random_case
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import helper

from dcut_engines.emit_onnx import emit_drafter
from dcut_engines.model_config import DrafterConfig, RopeConfig
from dcut_engines.onnx_graph import OPSET
from dcut_engines.weights import drafter_shapes
from dcut_plugins.confidence_topk_pack.contract import DOMAIN, INPUTS, NAME, OUTPUTS, VERSION, Packed, PackInputs
from dcut_plugins.confidence_topk_pack.onnx_function import attach_pack, pack_function, pack_node, value_infos
from dcut_plugins.confidence_topk_pack.reference import confidence_topk_pack, disagreement
from dcut_trt.errors import UnsupportedOption

# Probed as all that TensorRT's parser has; it refuses NonZero, and TopK past 3840.
PARSED = {"Add", "And", "Cast", "Concat", "Constant", "CumSum", "Div", "Equal", "Exp", "Gather", "Greater", "Less"}
PARSED |= {"Log", "Max", "Min", "Mul", "Not", "Or", "Range", "ReduceMax", "ReduceMin", "ReduceSum", "Reshape", "Shape"}
PARSED |= {"Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"}


def pack_model(length: int, budgets: int) -> onnx.ModelProto:
    """The node alone."""
    graph = helper.make_graph(
        [pack_node()], "pack", value_infos(INPUTS, length, budgets), value_infos(OUTPUTS, length, budgets)
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, int(VERSION))]
    version = helper.find_min_ir_version_for(opsets[:1])
    return helper.make_model(graph, opset_imports=opsets, functions=[pack_function(OPSET)], ir_version=version)


def session(model: bytes | str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class FunctionTwin:
    """Sessions by draft length and number of budgets."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[int, int], ort.InferenceSession] = {}

    def run(self, inputs: PackInputs) -> Packed:
        key = inputs.tokens.shape[1], len(inputs.budgets)
        if key not in self._sessions:
            self._sessions[key] = session(pack_model(*key).SerializeToString())
        return Packed(*self._sessions[key].run(list(OUTPUTS), inputs.arrays()))


@pytest.fixture(scope="module")
def function() -> FunctionTwin:
    return FunctionTwin()


def test_random_cases_agree_with_the_reference(function: FunctionTwin) -> None:
    rng = np.random.default_rng(5)
    for shape in [None] * 1000 + list(LARGEST):
        inputs = random_case(rng, shape)
        assert disagreement(inputs, function.run(inputs)) is None


AWKWARD = st.sampled_from([0.0, 1.0, 0.5, 0.5, 0.25, 1e-45, 1.1754944e-38, 1 - 2**-24, float("nan"), -1.0, 2.0])


@settings(derandomize=True, deadline=None, max_examples=100)
@given(data=st.data(), shape=st.sampled_from(SHAPES[:8]))
def test_any_inputs_agree_with_the_reference(
    function: FunctionTwin, data: st.DataObject, shape: tuple[int, int]
) -> None:
    confidence = data.draw(arrays(np.float32, shape, elements=AWKWARD | st.floats(0, 1, width=32)))
    budgets = data.draw(arrays(np.int32, 3, elements=st.integers(-(2**31), 2**31 - 1)))
    costs = data.draw(arrays(np.float32, 3, elements=st.floats(0.125, 1e4, width=32) | st.sampled_from([0, np.nan])))
    inputs = make_case(confidence, budgets, costs, bypass=data.draw(st.integers(-1, 1)))
    assert disagreement(inputs, function.run(inputs)) is None


def test_exact_cases_equal_the_reference(function: FunctionTwin) -> None:
    for name, inputs in exact_cases():
        got, expected = function.run(inputs), confidence_topk_pack(inputs)
        for output in OUTPUTS:
            np.testing.assert_array_equal(getattr(got, output), getattr(expected, output), err_msg=f"{name}: {output}")


def test_the_function_uses_only_what_tensorrt_parses() -> None:
    model = pack_model(15, 4)
    onnx.checker.check_model(model, full_check=True)
    assert {node.op_type for node in model.functions[0].node} <= PARSED
    (node,) = model.graph.node
    assert (node.domain, node.op_type) == ("dcut", "ConfidenceTopKPack")
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert attributes == {"plugin_namespace": b"dcut", "plugin_version": b"1"}


def test_tensorrt_rtx_parses_and_compiles_the_function_without_a_warning() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    said: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc,name-defined]
        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.WARNING:
                said.append(message)

    logger = Logger()
    builder = trt.Builder(logger)
    network, config = builder.create_network(0), builder.create_builder_config()
    assert trt.OnnxParser(network, logger).parse(pack_model(15, 4).SerializeToString())
    profile = builder.create_optimization_profile()
    for name, tail in {"tokens": (15,), "confidence": (15,), "anchors": (), "anchor_positions": ()}.items():
        profile.set_shape(name, *((batch, *tail) for batch in (1, 64, 64)))
    config.add_optimization_profile(profile)
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    assert builder.build_serialized_network(network, config) is not None
    assert said == []


DRAFTER = DrafterConfig(
    layers=1,
    hidden_size=16,
    intermediate_size=32,
    heads=2,
    kv_heads=1,
    head_dim=8,
    vocab_size=50,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0),
    attention_bias=False,
    block_size=5,
    mask_token_id=49,
    target_layer_ids=(0, 2),
    num_target_layers=3,
    causal=True,
)


@pytest.fixture
def drafter_path(tmp_path: Path) -> Path:
    rng = np.random.default_rng(6)
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in drafter_shapes(DRAFTER).items()}
    embedding = rng.standard_normal((DRAFTER.vocab_size, DRAFTER.hidden_size), np.float32)
    path = tmp_path / "drafter.onnx"
    emit_drafter(DRAFTER, weights, embedding, embedding, None, "fp32", 64, path, max_len=32)
    return path


def test_a_drafter_with_the_node_packs_what_it_drafts(drafter_path: Path) -> None:
    model = onnx.load(drafter_path, load_external_data=False)
    attach_pack(model, budgets=3, max_batch=64)
    onnx.save_model(model, drafter_path)
    onnx.checker.check_model(drafter_path, full_check=True)

    rng = np.random.default_rng(7)
    contexts, batch = np.array([3, 1, 5], np.int32), 3
    pack_feeds = {
        "anchors": np.array([4, 9, 17], np.int32),
        "anchor_positions": contexts,
        "budgets": np.array([4, 8, 15], np.int32),
        "cost_ms": np.array([1, 1.5, 2.5], np.float32),
        "bypass": np.zeros(1, np.int32),
    }
    feeds = {
        "features": rng.standard_normal((contexts.sum(), 2 * DRAFTER.hidden_size), np.float32),
        "context_positions": np.concatenate([np.arange(count, dtype=np.int32) for count in contexts]),
        "context_begins": np.array([0, *np.cumsum(contexts)], np.int32),
        "write_indices": np.zeros(batch, np.int32),
        "window_offsets": np.arange(contexts.max() + DRAFTER.block_size, dtype=np.int32),
        **{name: np.zeros((batch, 1, 32, 8), np.float32) for name in ("key_cache.0", "value_cache.0")},
    }
    runner = session(str(drafter_path))
    assert {value.name for value in runner.get_inputs()} == {*feeds, *pack_feeds}
    tokens, confidence, *packed = runner.run(["tokens", "confidence", *OUTPUTS], feeds | pack_feeds)
    assert tokens.shape == (batch, DRAFTER.draft_length)
    assert disagreement(PackInputs(tokens, confidence, **pack_feeds), Packed(*packed)) is None


def test_a_graph_past_the_limits_is_refused(drafter_path: Path) -> None:
    model = onnx.load(drafter_path, load_external_data=False)
    for budgets, max_batch in ((33, 64), (4, 820)):
        with pytest.raises(UnsupportedOption, match="must be in"):
            attach_pack(model, budgets=budgets, max_batch=max_batch)
    assert model == onnx.load(drafter_path, load_external_data=False)


def test_only_a_drafter_takes_the_node_and_only_once(drafter_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="lacks"):
        attach_pack(onnx.ModelProto(), budgets=4, max_batch=8)
    model = onnx.load(drafter_path, load_external_data=False)
    attach_pack(model, budgets=4, max_batch=8)
    with pytest.raises(UnsupportedOption, match="already"):
        attach_pack(model, budgets=4, max_batch=8)
    assert [function.name for function in model.functions] == [NAME]
