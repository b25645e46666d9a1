"""E2, E6: a killed build publishes nothing, and two builds agree by their inputs. What needs plans: tests/tensorrt."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from tiny_bundles import changed, leftovers, read_graph, start_builder, tiny_options, wait_for, wrote

from dcut_engines.build_options import BuildOptions
from dcut_engines.bundle import build
from dcut_trt.manifest import read_manifest, verify_files


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCUT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def options(tmp_path: Path) -> BuildOptions:
    return tiny_options(tmp_path)


@pytest.mark.parametrize("stage", ["write the drafter", "hash the bundle"])
def test_e2_a_killed_build_publishes_nothing(options: BuildOptions, stage: str) -> None:
    builder = start_builder(options, stop_at=stage)
    wait_for(builder, stage)
    builder.send_signal(signal.SIGKILL)
    builder.wait(30)
    assert not options.out.exists()
    assert len(leftovers(options)) == 1
    assert wrote(options)
    assert not leftovers(options)
    verify_files(options.out, read_manifest(options.out))


def test_e2_a_killed_rebuild_leaves_the_old_bundle(options: BuildOptions) -> None:
    manifest = read_manifest(build(options))
    builder = start_builder(options, precision="bf16", stop_at="write the drafter")
    wait_for(builder, "write the drafter")
    builder.kill()
    builder.wait(30)
    assert read_manifest(options.out) == manifest
    verify_files(options.out, manifest)


def test_e6_two_builds_of_the_same_inputs_agree_on_them(tmp_path: Path, options: BuildOptions) -> None:
    first = read_manifest(build(options))
    second = read_manifest(build(changed(options, out=tmp_path / "again")))
    assert (first.key, first.target, first.drafter, first.tokenizer) == (
        second.key,
        second.target,
        second.drafter,
        second.tokenizer,
    )
    assert constants_of(options.out) == constants_of(tmp_path / "again")


def constants_of(out: Path) -> list[bytes]:
    """The weights, whatever order or names the graph file gives them."""
    nodes = read_graph(out / "target.xml").get_ordered_ops()
    return sorted(np.asarray(node.data).tobytes() for node in nodes if node.get_type_name() == "Constant")
