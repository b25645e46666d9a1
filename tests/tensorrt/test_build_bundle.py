"""Bundles of plans: what the manifest says, and that a plan for anything else is refused before it is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx
from tiny_bundles import leftovers, wrote
from tiny_plans import rtx_options, target_graph

from dcut_engines.build_options import BuildOptions
from dcut_engines.build_progress import Report
from dcut_engines.bundle import build
from dcut_engines.cli import add_build_parser
from dcut_trt.errors import BundleError, EngineMismatch
from dcut_trt.manifest import MANIFEST_NAME, Manifest, read_manifest, verify_files
from dcut_trt.plans import check_plan_fits, rebuild_command

VERSION = str(tensorrt_rtx.__version__)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildOptions]:
    directory = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCUT_CACHE", str(directory / "cache"))
        yield rtx_options(directory)


@pytest.fixture(scope="module")
def built(options: BuildOptions) -> Path:
    return build(options)


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(built, tmp_path / "bundle")


# --- what a bundle holds


def test_the_manifest_says_what_the_plans_are(built: Path) -> None:
    manifest = read_manifest(built)
    verify_files(built, manifest)
    assert {"manifest.json", *manifest.files} == {path.name for path in built.iterdir()}
    assert {"target.plan", "drafter.plan", "tokenizer.json", "chat_template.jinja"} == manifest.files.keys()
    assert (manifest.backend, manifest.precision, manifest.tensorrt) == ("tensorrt-rtx", "fp16", VERSION)
    assert (manifest.compute_capability, manifest.versions["tensorrt-rtx"]) == ("8.9", VERSION)
    assert (manifest.cache_slots, manifest.prefill_chunk, manifest.max_len) == (64 + 8, 64, 64)
    assert manifest.token_buckets == (2, 4, 8)
    for name, plan in manifest.plans.items():
        assert (plan.file, plan.size) == (f"{name}.plan", manifest.files[f"{name}.plan"].size)
        assert plan.build_seconds > 0
    names = {name: [profile.name for profile in plan.profiles] for name, plan in manifest.plans.items()}
    assert names["target"] == ["verify-2", "verify-4", "verify-8", "decode", "prefill"]
    assert names["drafter"] == ["draft-1", "draft-2", "prefill"]
    dims = manifest.plans["target"].profiles[1].dims
    assert (dims["K"], dims["B"], dims["W"]) == ((4, 4, 4), (1, 2, 2), (4, 4, 4))


def test_the_drafter_packs_rows_under_the_names_of_the_targets_inputs(built: Path) -> None:
    tensors = read_manifest(built).tensors
    assert {"budgets", "cost_ms", "bypass", "anchor_positions"} <= set(tensors["drafter"]["inputs"])
    packed = {"token_ids", "request_rows", "depths", "positions", "subsequence_begins"}
    assert packed <= set(tensors["drafter"]["outputs"]) & set(tensors["target"]["inputs"])


def test_manifests_from_before_plans_are_still_read(bundle: Path) -> None:
    raw = json.loads((bundle / MANIFEST_NAME).read_text())
    for name in ("plans", "tensorrt", "compute_capability", "cache_slots", "prefill_chunk"):
        del raw[name]
    (bundle / MANIFEST_NAME).write_text(json.dumps(raw))
    old = read_manifest(bundle)
    assert (old.plans, old.tensorrt, old.compute_capability, old.cache_slots, old.prefill_chunk) == (
        {},
        None,
        None,
        0,
        0,
    )


def test_a_manifest_survives_its_file(built: Path, tmp_path: Path) -> None:
    manifest = read_manifest(built)
    (tmp_path / MANIFEST_NAME).write_text(manifest.to_json())
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    "broken", [{"file": "target.plan"}, {"profiles": [{"name": "p", "kind": "k", "dims": {"K": [1]}}]}]
)
def test_a_malformed_plan_entry(bundle: Path, broken: dict[str, Any]) -> None:
    raw = json.loads((bundle / MANIFEST_NAME).read_text())
    raw["plans"]["target"] = broken if "file" in broken else {**raw["plans"]["target"], **broken}
    (bundle / MANIFEST_NAME).write_text(json.dumps(raw))
    with pytest.raises(BundleError, match="malformed manifest"):
        read_manifest(bundle)


# --- E1: for another TensorRT or another GPU


def fits(bundle: Path, **found: str) -> None:
    here = {"backend": "tensorrt-rtx", "version": VERSION, "compute_capability": "8.9", **found}
    check_plan_fits(read_manifest(bundle), bundle, **here)


def test_e1_a_plan_fits_what_it_was_built_by_and_for(built: Path) -> None:
    fits(built)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tensorrt", "1.6.0.30", f"the plans were built for TensorRT 1.6.0.30; this machine has {VERSION}."),
        ("compute_capability", "12.0", "the plans were built for compute capability 12.0; this machine has 8.9."),
        ("compute_capability", None, "the plans were built for compute capability None; this machine has 8.9."),
        ("backend", "tensorrt", "the plans were built for backend tensorrt; this machine has tensorrt-rtx."),
    ],
)
def test_e1_an_edited_manifest_does_not_fit(bundle: Path, field: str, value: str | None, message: str) -> None:
    raw = json.loads((bundle / MANIFEST_NAME).read_text())
    (bundle / MANIFEST_NAME).write_text(json.dumps({**raw, field: value}))
    with pytest.raises(EngineMismatch) as refused:
        fits(bundle)
    assert message in str(refused.value)
    assert f"Rebuild: dcut-trt build --target target --drafter drafter --out {bundle} " in str(refused.value)


def test_e1_the_command_that_rebuilds_is_one_that_builds(built: Path, options: BuildOptions) -> None:
    parser = argparse.ArgumentParser()
    add_build_parser(parser.add_subparsers())
    _, *arguments = rebuild_command(read_manifest(built), built, "tensorrt-rtx").split()
    args = parser.parse_args(arguments)
    for name in ("backend", "precision", "max_batch", "max_len", "ratios"):
        assert getattr(args, name) == getattr(options, name)
    assert (args.target, args.drafter, args.out, args.prefill_chunk) == ("target", "drafter", built, 64)


@pytest.mark.parametrize("field", ["plans", "files"])
def test_a_plan_that_is_not_listed(built: Path, field: str) -> None:
    manifest = read_manifest(built)
    listed = {name: spec for name, spec in getattr(manifest, field).items() if "drafter" not in name}
    bare: Manifest = dataclasses.replace(manifest, **{field: listed})
    with pytest.raises(BundleError, match="the manifest lists no plan for the drafter"):
        check_plan_fits(bare, built, backend="tensorrt-rtx", version=VERSION, compute_capability="8.9")


# --- E2: a plan that is not what was built


def flip(plan: Path) -> None:
    contents = bytearray(plan.read_bytes())
    contents[len(contents) // 2] ^= 1
    plan.write_bytes(contents)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "onnx": lambda plan: target_graph(plan, "fp16"),
    "empty": lambda plan: plan.write_bytes(b""),
    "flipped": flip,
    "truncated": lambda plan: os.truncate(plan, plan.stat().st_size - 1),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_e2_a_damaged_plan_is_refused_by_its_checksum(bundle: Path, damage: str) -> None:
    DAMAGES[damage](bundle / "target.plan")
    with pytest.raises(BundleError, match=r"target\.plan (has|is missing)"):
        verify_files(bundle, read_manifest(bundle))


def test_e2_ctrl_c_stops_the_compiler_and_publishes_nothing(tmp_path: Path, options: BuildOptions) -> None:
    interrupted = dataclasses.replace(options, out=tmp_path / "out" / "bundle")
    after: list[float] = []

    @contextmanager
    def progress(stage: str) -> Iterator[Report]:
        def interrupt(done: float) -> None:
            if not after:
                os.kill(os.getpid(), signal.SIGINT)
            after.append(done)

        yield interrupt if stage == "compile the target" else lambda done: None

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        build(interrupted, progress)
    assert after[-1] < 0.5
    assert not interrupted.out.exists()
    assert not leftovers(interrupted)
    assert signal.getsignal(signal.SIGINT) is before


# --- E6: built again


def test_e6_what_is_built_twice_is_the_same_by_its_inputs(built: Path, tmp_path: Path, options: BuildOptions) -> None:
    """Plan bytes differ from build to build, even in one process."""
    assert not wrote(options)
    again = build(dataclasses.replace(options, out=tmp_path / "again"))
    first, second = read_manifest(built), read_manifest(again)
    assert comparable(first) == comparable(second)
    fits(again)


def comparable(manifest: Manifest) -> Manifest:
    plans = {name: dataclasses.replace(plan, size=0, build_seconds=0) for name, plan in manifest.plans.items()}
    return dataclasses.replace(manifest, plans=plans, files={})


def test_the_command_line_finds_the_same_bundle(
    built: Path, options: BuildOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_build_parser(parser.add_subparsers())
    command = ["build", "--target", options.target, "--drafter", options.drafter, "--out", str(options.out)]
    command += ["--backend", "tensorrt-rtx", "--precision", "fp16", "--compute-capability", "8.9"]
    args = parser.parse_args([*command, "--max-batch", "2", "--max-len", "64", "--ratios", "0.5,1"])
    before = (built / MANIFEST_NAME).stat().st_mtime_ns
    assert args.run(args) == 0
    assert f"{built}: target + drafter, tensorrt-rtx fp16, " in capsys.readouterr().out
    assert (built / MANIFEST_NAME).stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "changes", [{"compute_capability": "12.0"}, {"prefill_chunk": 32}, {"workspace_mib": 512}, {"precision": "bf16"}]
)
def test_other_plans_have_another_key(
    built: Path, options: BuildOptions, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dcut_engines import bundle as module  # noqa: PLC0415

    class Stop(Exception):
        pass

    keys: list[str] = []

    def remember(directory: Path, inputs: Any, key: str, progress: Any) -> None:
        keys.append(key)
        raise Stop

    monkeypatch.setattr(module, "_write", remember)
    with pytest.raises(Stop):
        build(dataclasses.replace(options, **changes))
    assert keys != [read_manifest(built).key]
    assert read_manifest(built)
