"""Bundles that the TensorRT backend must refuse before anything runs, each with what its user can do about it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trt_double
from double_bundles import CAPABILITY, MAX_BATCH, PLUGIN, VERSION, open_double, open_engine, tiny_bundle
from test_runtime_greedy import alone, requests, serve
from trt_double import TAG

from dcut_server import compose
from dcut_trt.backends import tensorrt
from dcut_trt.backends.tensorrt import TensorRt, load_tensorrt, open_tensorrt
from dcut_trt.config import EngineOptions
from dcut_trt.errors import BundleError, EngineMismatch, UnsupportedOption
from dcut_trt.manifest import Manifest, PlanSpec, ProfileSpec, read_manifest

MEBIBYTE = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A copy of the tiny bundle, to be changed."""
    return Path(shutil.copytree(tiny_bundle(), tmp_path / "bundle"))


def load(path: Path, manifest: Manifest | None = None, runtime: TensorRt | None = None, **fields: Any) -> None:
    load_tensorrt(path, manifest or read_manifest(path), EngineOptions(**fields), runtime or open_double())


@pytest.mark.parametrize("plan", ["target.plan", "drafter.plan"])
@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"?" + data[1:]])
def test_e2_a_damaged_plan_is_found_before_it_is_loaded(
    path: Path, plan: str, damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path / plan).write_bytes(damage((path / plan).read_bytes()))
    monkeypatch.setattr(compose, "load_networks", None)
    with pytest.raises(BundleError, match=rf"{plan} has (\d+ bytes|sha256 \w+), the manifest says"):
        compose.open_engine(path, EngineOptions())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tensorrt", "11.3.0.9", f"built for TensorRT 11.3.0.9; this machine has {VERSION}"),
        ("compute_capability", "9.0", f"built for compute capability 9.0; this machine has {CAPABILITY}"),
        ("backend", "tensorrt-rtx", "built for backend tensorrt-rtx; this machine has tensorrt"),
    ],
)
def test_e1_plans_of_another_tensorrt_or_device(path: Path, field: str, value: str, words: str) -> None:
    runtime = open_double()
    with pytest.raises(EngineMismatch, match=f"{words}. Rebuild: dcut-trt build --target"):
        load(path, dataclasses.replace(read_manifest(path), **{field: value}), runtime)
    assert runtime.module.engines == {}


def test_e2_a_file_that_is_no_plan(path: Path) -> None:
    (path / "drafter.plan").write_bytes(b"\x00" * 64)
    with pytest.raises(BundleError, match=r"drafter.plan: TensorRT cannot load it \(this is no plan\)"):
        load(path)


def test_e2_an_onnx_graph_in_the_place_of_a_plan(path: Path) -> None:
    graph = json.loads((path / "target.plan").read_bytes().removeprefix(TAG))["graph"]
    shutil.copyfile(graph, path / "target.plan")
    runtime = open_double()
    with pytest.raises(BundleError, match=r"target.plan is an ONNX graph, not a TensorRT plan"):
        load(path, runtime=runtime)
    assert runtime.module.engines == {}


def test_e3_a_plugin_that_is_missing(path: Path) -> None:
    runtime = open_double()
    del runtime.module.registry.creators[PLUGIN]
    words = "no creator of plugin ConfidenceTopKPack, version 1, namespace 'dcut' is registered"
    with pytest.raises(EngineMismatch, match=words):
        load(path, runtime=runtime)


def test_e3_a_plan_that_holds_its_plugin_needs_no_creator(path: Path) -> None:
    rewrite(path / "drafter.plan", plugins=[])
    runtime = open_double()
    del runtime.module.registry.creators[PLUGIN]
    load(path, runtime=runtime)


def rewrite(plan: Path, **fields: Any) -> None:
    content = json.loads(plan.read_bytes().removeprefix(TAG))
    plan.write_bytes(TAG + json.dumps(content | fields).encode())


def changed_profile(manifest: Manifest, plan: str, index: int, **dims: tuple[int, int, int]) -> Manifest:
    spec = manifest.plans[plan]
    profiles = list(spec.profiles)
    old = profiles[index]
    profiles[index] = ProfileSpec(old.name, old.kind, {**old.dims, **dims})
    return with_plan(manifest, plan, dataclasses.replace(spec, profiles=tuple(profiles)))


def with_plan(manifest: Manifest, name: str, spec: PlanSpec) -> Manifest:
    return dataclasses.replace(manifest, plans={**manifest.plans, name: spec})


@pytest.mark.parametrize(("plan", "dim", "wrong"), [("target", "K", (7, 7, 7)), ("drafter", "W", (8, 9, 9))])
def test_a_profile_that_is_not_the_manifests(path: Path, plan: str, dim: str, wrong: tuple[int, int, int]) -> None:
    manifest = changed_profile(read_manifest(path), plan, 2, **{dim: wrong})
    with pytest.raises(BundleError, match=rf"{plan}.plan: \w+: its range in profile .* by the manifest"):
        load(path, manifest)


def test_a_profile_too_few(path: Path) -> None:
    manifest = read_manifest(path)
    spec = manifest.plans["target"]
    fewer = dataclasses.replace(spec, profiles=spec.profiles[:-1])
    count = len(spec.profiles)
    with pytest.raises(BundleError, match=f"the plan has {count} profiles, the manifest {count - 1}"):
        load(path, with_plan(manifest, "target", fewer))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cache_slots": 96}, "key_cache.0: its shape is .* in the plan, .*96.* by the manifest"),
        ({"precision": "fp16"}, "its type is .*FLOAT.* in the plan, .*HALF.* by the manifest"),
        ({"ratios": (0.5, 1.0)}, r"budgets: its shape is \(4,\) in the plan, \(2,\) by the manifest"),
    ],
)
def test_an_engine_that_is_not_the_manifests(path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(BundleError, match=words):
        load(path, dataclasses.replace(read_manifest(path), **change))


def test_a_layer_too_many(path: Path) -> None:
    manifest = read_manifest(path)
    target = dataclasses.replace(manifest.target, layers=manifest.target.layers + 1)
    with pytest.raises(BundleError, match=r"target.plan: the plan lacks a tensor '(key|value)_cache(_out)?\.2'"):
        load(path, dataclasses.replace(manifest, target=target))


def test_a_cache_that_is_not_written_in_place(path: Path) -> None:
    rewrite(path / "target.plan", aliased=False)
    with pytest.raises(BundleError, match=r"key_cache_out.0: its aliased input is None in the plan, key_cache.0 by"):
        load(path)


@pytest.mark.parametrize(
    ("slots", "words"),
    [(65, "cache_slots=65: 64 tokens need two blocks more"), (73, "a cache row has 9344 bytes, which is no multiple")],
)
def test_a_cache_that_no_window_or_address_fits(path: Path, slots: int, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        load(path, dataclasses.replace(read_manifest(path), cache_slots=slots))


def test_e5_too_little_memory_for_what_the_manifest_tells(path: Path) -> None:
    runtime = open_double(free=MEBIBYTE // 2)
    with pytest.raises(EngineMismatch, match=r"needs 1 MiB of device memory \(target.plan 1, .*\), and 0 MiB are free"):
        load(path, runtime=runtime)
    assert runtime.module.engines == {}


def test_e5_what_is_told_covers_what_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, int]] = []
    monkeypatch.setattr(tensorrt, "_check_memory", lambda bundle, device, parts: told.append(dict(parts)))
    runtime = open_double()
    networks = load_tensorrt(path, read_manifest(path), EngineOptions(), runtime)
    taken = runtime.device.free - runtime.device.free_bytes()
    kept = networks[0]._memory.features.output.nbytes  # so much may be copied out later
    assert 0.9 * sum(told[-1].values()) < taken + kept <= sum(told[-1].values())


def test_e5_too_little_memory_for_the_scratch_of_the_largest_profile(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trt_double, "SCRATCH_PER_ROW", MEBIBYTE)  # 28 rows at most
    runtime = open_double(free=28 * MEBIBYTE)
    with pytest.raises(EngineMismatch, match=r"needs \d+ MiB of device memory \(.*, scratch 28\), and 28 MiB are free"):
        load(path, runtime=runtime)
    load(path, runtime=open_double(free=31 * MEBIBYTE))


def test_e5_no_slot_for_a_single_request(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "MEBIBYTE", 1 << 10)  # a request has 54 KiB of KV cache
    with pytest.raises(EngineMismatch, match="kv_memory_mib=53: one request needs 54 MiB of KV cache"):
        load(path, kv_memory_mib=53)
    for memory, slots in ((54, 1), (107, 1), (54 * 3, 2), (54 * 4, 3), (54 * 100, MAX_BATCH)):
        runtime = open_double()
        engine = open_engine(runtime, path, "ratio:0.5", kv_memory_mib=memory)
        assert engine.limits.max_batch == engine.limits.num_blocks == slots
        assert slots == MAX_BATCH or serve(engine, requests(), slots) == alone("llama")


def test_options_that_this_backend_does_not_have(path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="threads=4: not with --backend tensorrt"):
        load(path, threads=4)


@pytest.mark.parametrize("policy", ["dflash", "ratio:0.8", "tetris:4", "dspark", "smartspec", "threshold:0.5"])
def test_a_policy_that_asks_for_more_rows_than_plans_take(path: Path, policy: str) -> None:
    manifest = dataclasses.replace(read_manifest(path), ratios=(0.25, 0.75))
    with pytest.raises(UnsupportedOption, match=f"policy='{policy}': the plans verify up to a ratio of 0.75"):
        load(path, manifest, policy=policy)


def test_an_empty_package_of_that_name_is_not_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tensorrt.MODULES, "tensorrt", "no_tensorrt_here")
    with pytest.raises(EngineMismatch, match=r"needs no_tensorrt_here, which is not installed here: pip install"):
        open_tensorrt("tensorrt")
    (tmp_path / "no_tensorrt_here").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineMismatch, match=r"not installed here: pip install 'dcut-trt\[tensorrt\]'"):
        open_tensorrt("tensorrt")


def test_the_composition_root_serves_a_plan_bundle(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = open_double()
    monkeypatch.setattr(tensorrt, "open_tensorrt", lambda backend: {"tensorrt": runtime}[backend])
    engine = compose.open_engine(path, EngineOptions(policy="dcut"))
    assert engine.cost_table is not None
    assert f"tensorrt {VERSION}, host, CUDA graphs on" in engine.cost_table.fingerprint
    assert serve(engine, requests()) == alone("llama")
    engine.close()


def test_the_composition_root_refuses_an_exchange_format(path: Path) -> None:
    manifest = dataclasses.replace(read_manifest(path), backend="onnx")
    with pytest.raises(EngineMismatch, match="--backend onnx, which is an exchange format"):
        compose.load_networks(path, manifest, EngineOptions())
