"""What a build refuses, in our own words and before TensorRT's."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tensorrt_rtx
from onnx import TensorProto, helper, numpy_helper
from tiny_checkpoints import DRAFTER, TARGET, write_drafter, write_target
from tiny_plans import LAYOUT, edit_graph, rtx, rtx_options, target_graph

from dcut_engines import tensorrt_limits, tensorrt_network
from dcut_engines.build_options import BuildOptions, InvalidOption
from dcut_engines.bundle import build
from dcut_engines.tensorrt_build import compile_plan, open_tensorrt
from dcut_engines.tensorrt_graph import check_network_inputs, read_inputs
from dcut_engines.tensorrt_limits import choose_compute_capability
from dcut_engines.tensorrt_profiles import GraphInput, PlanError, target_profiles
from dcut_trt.errors import UnsupportedModel, UnsupportedOption

PREFILL = target_profiles(LAYOUT)[-1:]


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    target_graph(tmp_path / "target.onnx", "fp16")
    return tmp_path / "target.onnx"


def attempt(graph: Path, precision: str = "fp16", layers: int = 3, profiles: Any = PREFILL) -> None:
    compile_plan(*(rtx("8.9"), graph, profiles, graph.with_suffix(".plan")), precision=precision, layers=layers)


# --- the graph


def test_a_build_in_another_precision_than_the_graph(graph: Path) -> None:
    with pytest.raises(PlanError, match=r"input key_cache\.0: fp16, and the build is bf16"):
        attempt(graph, precision="bf16")


def test_types_mixed_inside_the_graph(graph: Path) -> None:
    def mix(contents: Any) -> None:
        contents.node.extend(
            [
                helper.make_node("Cast", ["features"], ["wide"], "widen", to=TensorProto.FLOAT),
                helper.make_node("Add", ["wide", "features"], ["mixed"], "mix"),
            ]
        )
        contents.output.append(helper.make_tensor_value_info("mixed", TensorProto.FLOAT, ["K", 128]))

    edit_graph(graph, mix)
    with pytest.raises(PlanError, match=r"target\.onnx: TensorRT's parser refused it: .*mix"):
        attempt(graph)


def test_lengths_given_to_attention_in_the_graph(graph: Path) -> None:
    """TensorRT's parser says nothing and leaves them out."""

    def add_lengths(contents: Any) -> None:
        contents.node.insert(0, helper.make_node("Cast", ["write_indices"], ["lens"], to=TensorProto.INT64))
        for node in contents.node:
            if node.op_type == "Attention":
                node.input.extend(["", "", "lens"])

    edit_graph(graph, add_lengths)
    with pytest.raises(PlanError, match=r"node Attention.*: TensorRT's parser drops all inputs past its first 4: lens"):
        attempt(graph)


def test_an_input_that_nothing_reads(graph: Path) -> None:
    """TensorRT only warns, and only while it builds."""
    unused = helper.make_tensor_value_info("unread", TensorProto.INT32, ["B"])
    edit_graph(graph, lambda contents: contents.input.append(unused))
    with pytest.raises(PlanError, match="unread"):
        attempt(graph)


def test_a_warning_of_the_parser(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_long(contents: Any) -> None:
        contents.input.append(helper.make_tensor_value_info("long", TensorProto.INT64, ["B"]))
        contents.node.append(helper.make_node("Cast", ["long"], ["short"], "shorten", to=TensorProto.INT32))
        contents.output.append(helper.make_tensor_value_info("short", TensorProto.INT32, ["B"]))

    edit_graph(graph, take_long)
    with pytest.raises(
        PlanError, match=r"target\.onnx: TensorRT warns, and a build must not pass that over: .*long has Int64 binding"
    ):
        attempt(graph)
    monkeypatch.setattr(tensorrt_network, "ALLOWED_WARNINGS", ((r"Int64 binding", "this test binds none"),))
    attempt(graph)


@pytest.mark.parametrize(("wanted", "refused"), [(3840, False), (3841, True)])
@pytest.mark.parametrize("constant", [True, False], ids=["node", "initializer"])
def test_topk_past_tensorrts_limit(tmp_path: Path, wanted: int, refused: bool, constant: bool) -> None:
    count = numpy_helper.from_array(np.array([wanted], np.int64), "count")
    nodes = [helper.make_node("TopK", ["values", "count"], ["best", "places"], "ranking")]
    if constant:
        nodes.insert(0, helper.make_node("Constant", [], ["count"], value=count))
    inputs = [helper.make_tensor_value_info("values", TensorProto.FLOAT16, ["N"])]
    outputs = [helper.make_tensor_value_info("best", TensorProto.FLOAT16, ["M"])]
    contents = helper.make_graph(nodes, "ranking", inputs, outputs, initializer=[] if constant else [count])
    onnx.save_model(helper.make_model(contents), tmp_path / "ranking.onnx")
    if not refused:
        assert [entry.name for entry in read_inputs(tmp_path / "ranking.onnx", "fp16")] == ["values"]
        return
    with pytest.raises(PlanError, match="node ranking: TopK with K = 3841; TensorRT's limit is 3840"):
        read_inputs(tmp_path / "ranking.onnx", "fp16")


def test_layers_that_tensorrt_would_decompose(graph: Path) -> None:
    with pytest.raises(PlanError, match=r"target\.onnx: 3 ATTENTION_INPUT layers after parsing, 4 in the graph"):
        attempt(graph, layers=4)


@pytest.mark.parametrize(
    ("parsed", "message"),
    [
        ([("a", "i32")], "input b: TensorRT's parser dropped it"),
        ([("a", "i32"), ("b", "fp32")], "input b: fp16 in the graph, fp32 after parsing"),
        ([("a", "i32"), ("b", "fp16"), ("c", "i32")], "input c: TensorRT's parser added it"),
    ],
)
def test_a_network_with_other_inputs_than_the_graph(parsed: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_network_inputs([GraphInput("a", "i32", ("B",)), GraphInput("b", "fp16", ("B",))], parsed)


# --- profiles, as the build meets them


def test_a_profile_without_a_dimension_of_the_graph(graph: Path) -> None:
    (profile,) = PREFILL
    bare = dataclasses.replace(profile, dims={name: span for name, span in profile.dims.items() if name != "W"})
    with pytest.raises(PlanError, match="profile prefill: dimension W of input window_offsets has no range"):
        attempt(graph, profiles=[bare])


def test_a_profile_that_contradicts_itself(graph: Path) -> None:
    (profile,) = PREFILL
    torn = dataclasses.replace(profile, dims={**profile.dims, "B": (1, 2, 2)})
    with pytest.raises(PlanError, match=r"B_plus_1 = \[2, 2, 2\] contradicts B = \[1, 2, 2\]"):
        attempt(graph, profiles=[torn])


# --- TensorRT itself


def test_what_tensorrt_says_is_in_the_error(graph: Path) -> None:
    """It has no fused attention for fp32, and graphs do not let it decompose any."""
    target_graph(graph, "fp32")
    with pytest.raises(PlanError, match=r"target\.onnx: TensorRT compiled no plan: .*by a dedicated kernel"):
        attempt(graph, precision="fp32")


def test_a_logger_of_someone_else_would_swallow_the_warnings() -> None:
    code = """
        import tensorrt_rtx as trt
        from dcut_engines.tensorrt_network import open_builder
        first = trt.Builder(trt.Logger(trt.Logger.ERROR))
        open_builder(trt)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "PlanError: TensorRT has another logger in this process" in done.stderr


@pytest.mark.parametrize(
    ("backend", "command"),
    [
        ("tensorrt", "needs tensorrt: pip install --extra-index-url https://pypi.nvidia.com 'dcut-trt[tensorrt]'"),
        ("tensorrt-rtx", "needs tensorrt_rtx: pip install 'dcut-trt[tensorrt-rtx]'"),
    ],
)
def test_a_package_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, command: str
) -> None:
    monkeypatch.setitem(sys.modules, backend.replace("-", "_"), None)
    with pytest.raises(InvalidOption) as refused:
        build(rtx_options(tmp_path, backend=backend, compute_capability=None))
    assert command in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_package_without_its_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorrt_rtx")
    (tmp_path / "tensorrt_rtx.py").write_text("raise ImportError('libtensorrt_rtx.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidOption, match=r"tensorrt_rtx cannot be imported: libtensorrt_rtx\.so\.1: cannot open"):
        open_tensorrt(rtx_options(tmp_path))


def test_a_package_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", types.SimpleNamespace(__version__="1.4.0.76"))
    with pytest.raises(InvalidOption, match=r"needs tensorrt_rtx 1\.7 or newer, and 1\.4\.0\.76 is installed"):
        open_tensorrt(rtx_options(tmp_path))


# --- the device


def options(**changes: Any) -> BuildOptions:
    base = BuildOptions("t", "d", Path("out"), backend="tensorrt-rtx", precision="fp16")
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("changes", "local", "message"),
    [
        (
            {"compute_capability": "9.0"},
            None,
            "--compute-capability 9.0: tensorrt-rtx supports 7.5, 8.0, 8.6, 8.9, 12.0",
        ),
        ({}, "9.0", "--compute-capability 9.0: tensorrt-rtx supports"),
        ({}, None, r"--compute-capability \(none\): there is no GPU here to take it from; name one of 7.5"),
        ({"compute_capability": "7.5", "precision": "bf16"}, None, "compute capability 7.5 has no bf16"),
        ({"backend": "tensorrt"}, None, "--backend tensorrt: it compiles on the GPU it compiles for; none is here"),
        (
            {"backend": "tensorrt", "compute_capability": "8.9"},
            "9.0",
            "tensorrt compiles for the local GPU, which has 9.0",
        ),
    ],
)
def test_a_gpu_that_cannot_be_compiled_for(changes: dict[str, Any], local: str | None, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        choose_compute_capability(options(**changes), local)


@pytest.mark.parametrize(
    ("changes", "local", "chosen"),
    [
        ({"compute_capability": "12.0"}, None, "12.0"),
        ({"compute_capability": "12.0"}, "8.9", "12.0"),
        ({}, "8.9", "8.9"),
        ({"backend": "tensorrt"}, "9.0", "9.0"),
        ({"backend": "tensorrt", "compute_capability": "9.0"}, "9.0", "9.0"),
    ],
)
def test_the_gpu_that_plans_are_for(changes: dict[str, Any], local: str | None, chosen: str) -> None:
    assert choose_compute_capability(options(**changes), local) == chosen


def test_every_listed_gpu_has_a_name_in_tensorrt_rtx() -> None:
    listed = {f"SM{capability.replace('.', '')}" for capability in tensorrt_limits.RTX_CAPABILITIES}
    assert listed | {"NONE", "CURRENT"} == set(tensorrt_rtx.ComputeCapability.__members__)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp32"}, "--precision fp32: fp16 or bf16 with --backend tensorrt-rtx"),
        ({"compute_capability": "89"}, "--compute-capability 89: MAJOR.MINOR, such as 8.9"),
        ({"prefill_chunk": 0}, "--prefill-chunk 0: from 1 to 8192"),
        ({"workspace_mib": 0}, "--workspace-mib 0: at least 1"),
        ({"backend": "openvino", "precision": "fp16"}, "--precision fp16: fp32 or bf16 with --backend openvino"),
        (
            {"backend": "onnx", "compute_capability": "8.9"},
            "--compute-capability 8.9: only with --backend tensorrt or tensorrt-rtx, not onnx",
        ),
        ({"backend": "openvino", "precision": "fp32", "prefill_chunk": 64}, "--prefill-chunk 64: only with --backend"),
    ],
)
def test_options_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        options(**changes)


def test_heads_without_a_kernel(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "small", TARGET), write_drafter(tmp_path / "small-drafter", DRAFTER)
    with pytest.raises(UnsupportedModel, match=r"target: head_dim=8: .* needs a multiple of 8 from 16 to 256"):
        build(rtx_options(tmp_path, target=str(target), drafter=str(drafter)))
    assert not (tmp_path / "out").exists()


def test_more_drafts_than_the_pack_node_takes(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "long", {**DRAFTER, "head_dim": 16, "block_size": 64})
    with pytest.raises(UnsupportedOption, match=r"batch=65, draft length=63: .* = 4160 must be in 2..4096"):
        build(rtx_options(tmp_path, drafter=str(drafter), max_batch=65))
