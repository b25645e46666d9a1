"""TensorRT-RTX really compiles our graphs, on a machine without a GPU: every profile, and its own layers throughout."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import tensorrt_rtx
from tiny_plans import LAYOUT, drafter_graph, rtx, target_graph

from dcut_engines.build_options import BuildOptions
from dcut_engines.bundle import build
from dcut_engines.digests import cache_dir
from dcut_engines.tensorrt_build import compile_plan, load_timing_cache, save_timing_cache, timing_cache_path
from dcut_engines.tensorrt_network import Network, journal_of
from dcut_engines.tensorrt_profiles import drafter_profiles, target_profiles
from dcut_trt.manifest import read_manifest, verify_files

CASES = [("llama3", "fp16", "8.9"), ("llama3", "bf16", "12.0"), ("qwen3", "bf16", "8.9"), ("qwen3", "fp16", "12.0")]


@pytest.mark.parametrize(("model", "precision", "capability"), CASES)
def test_a_target_compiles_with_every_profile(tmp_path: Path, model: str, precision: str, capability: str) -> None:
    layers = target_graph(tmp_path / "target.onnx", precision, model)
    profiles = target_profiles(LAYOUT)
    done: list[float] = []
    plan = compile_plan(
        *(rtx(capability), tmp_path / "target.onnx", profiles, tmp_path / "target.plan"),
        precision=precision,
        layers=layers,
        report=done.append,
    )
    assert [profile.name for profile in plan.profiles] == [
        *(f"verify-{rows}" for rows in (1, 2, 3, 4, 6, 8, 12)),
        "decode",
        "prefill",
    ]
    assert plan.file == "target.plan"
    assert plan.size == (tmp_path / "target.plan").stat().st_size > 1e6
    assert plan.build_seconds > 0
    assert done == sorted(done)
    assert 0 < done[0] < 0.1
    assert 0.5 < done[-1] <= 1


@pytest.mark.parametrize(("causal", "precision", "capability"), [(True, "fp16", "8.9"), (False, "bf16", "12.0")])
def test_a_drafter_compiles_with_the_pack_node_at_its_tail(
    tmp_path: Path, causal: bool, precision: str, capability: str
) -> None:
    layers = drafter_graph(tmp_path / "drafter.onnx", precision, causal=causal)
    plan = compile_plan(
        *(rtx(capability), tmp_path / "drafter.onnx", drafter_profiles(LAYOUT), tmp_path / "drafter.plan"),
        precision=precision,
        layers=layers,
    )
    assert [profile.name for profile in plan.profiles] == ["draft-1", "draft-2", "draft-3", "prefill"]
    assert plan.size > 1e6


@pytest.mark.parametrize("model", ["llama3", "qwen3"])
def test_layers_are_tensorrts_own_after_parsing(tmp_path: Path, model: str) -> None:
    layers = target_graph(tmp_path / "target.onnx", "fp16", model)
    network = parsed(tmp_path / "target.onnx")
    counts = network.layers()
    assert (counts["ATTENTION_INPUT"], counts["ATTENTION_OUTPUT"]) == (layers, layers)
    assert (counts["KV_CACHE_UPDATE"], counts["ROTARY_EMBEDDING"]) == (2 * layers, 2 * layers)
    assert not {"SOFTMAX", "PLUGIN_V3", "LOOP_OUTPUT", "CONDITION"} & counts.keys()
    assert counts["MATRIX_MULTIPLY"] == 7 * layers + 1


def test_the_drafters_layers_too(tmp_path: Path) -> None:
    layers = drafter_graph(tmp_path / "drafter.onnx", "fp16", causal=True)
    counts = parsed(tmp_path / "drafter.onnx").layers()
    assert counts["ATTENTION_INPUT"] == layers
    assert (counts["KV_CACHE_UPDATE"], counts["ROTARY_EMBEDDING"]) == (2 * layers, 2 * layers)


def test_attention_reads_no_further_than_its_window(tmp_path: Path) -> None:
    layers = target_graph(tmp_path / "target.onnx", "fp16")
    network = parsed(tmp_path / "target.onnx")
    network.limit_keys()
    lengths = [attention.key_value_lengths for attention in attentions(network)]
    assert len(lengths) == layers
    assert {(tuple(tensor.shape), tensor.dtype.name) for tensor in lengths} == {((-1,), "INT32")}


def parsed(graph: Path) -> Network:
    return Network(tensorrt_rtx, tensorrt_rtx.Builder(journal_of(tensorrt_rtx)), graph, plugins=0)


def attentions(network: Network) -> list[tensorrt_rtx.IAttention]:
    found = []
    for index in range(network.definition.num_layers):
        layer = network.definition.get_layer(index)
        if layer.type == tensorrt_rtx.LayerType.ATTENTION_INPUT:
            layer.__class__ = tensorrt_rtx.IAttentionInputLayer
            found.append(layer.attention)
    return found


def test_a_limit_on_scratch_memory_reaches_tensorrt(tmp_path: Path) -> None:
    layers = target_graph(tmp_path / "target.onnx", "fp16")
    profiles = target_profiles(LAYOUT)[-1:]
    arguments = (tmp_path / "target.onnx", profiles, tmp_path / "target.plan")
    plan = compile_plan(rtx("8.9", workspace_mib=64), *arguments, precision="fp16", layers=layers)
    assert plan.profiles == profiles


def test_timing_caches_are_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-RTX has the calls, and keeps nothing in them; TensorRT measures on its GPU."""
    monkeypatch.setenv("DCUT_CACHE", str(tmp_path))
    tensorrt, builder = rtx("8.9"), tensorrt_rtx.Builder(journal_of(tensorrt_rtx))
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        for _ in range(2):
            config = builder.create_builder_config()
            save_timing_cache(tensorrt, load_timing_cache(tensorrt, config))
            assert timing_cache_path(tensorrt).stat().st_size > 0
        timing_cache_path(tensorrt).write_bytes(b"not a timing cache")
        assert load_timing_cache(tensorrt, builder.create_builder_config()) is not None
    assert timing_cache_path(tensorrt).parent == tmp_path / "tensorrt"
    assert [path.name for path in timing_cache_path(tensorrt).parent.iterdir()] == [timing_cache_path(tensorrt).name]


@pytest.mark.parametrize("capability", ["8.9", "12.0"])
def test_smollm2_compiles_whole(capability: str) -> None:
    """The real target and its shipped drafter, with every profile of B = 1..32 and the default ratios."""
    out = cache_dir() / "tests" / f"smollm2-rtx-fp16-{capability}"
    options = BuildOptions(
        *("smollm2-135m-instruct", "smollm2-135m-dflash-b8", out),
        backend="tensorrt-rtx",
        precision="fp16",
        compute_capability=capability,
    )
    manifest = read_manifest(build(options))
    verify_files(out, manifest)
    profiles = {name: [profile.name for profile in plan.profiles] for name, plan in manifest.plans.items()}
    buckets = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert profiles["target"] == [*(f"verify-{rows}" for rows in buckets), "decode", "prefill"]
    assert profiles["drafter"] == [*(f"draft-{batch}" for batch in (1, 2, 4, 8, 16, 32)), "prefill"]
    # Weights are in the plan once: a second copy of the layers' alone is 213 MB. Each profile adds 15 MB of its own.
    weights, own = 269.5e6, 18e6
    assert weights < manifest.plans["target"].size < weights + len(profiles["target"]) * own
