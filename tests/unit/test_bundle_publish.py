"""Publishing: whatever kills a build, and whoever else builds, nobody ever sees half of a bundle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tiny_bundles import changed, leftovers, start_builder, tiny_options, wait_for

from dcut_engines import bundle as bundle_module
from dcut_engines import publish
from dcut_engines.build_options import BuildOptions
from dcut_engines.bundle import build
from dcut_trt.errors import BundleError
from dcut_trt.manifest import read_manifest, verify_files


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCUT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def options(tmp_path: Path) -> BuildOptions:
    return tiny_options(tmp_path)


def test_another_bundle_is_replaced_and_what_is_no_bundle_is_not(tmp_path: Path, options: BuildOptions) -> None:
    build(options)
    (options.out / "stale").touch()
    build(changed(options, precision="bf16"))
    assert not (options.out / "stale").exists()
    assert not leftovers(options)

    for name, content in (("file", None), ("notes.txt", "my thesis"), ("manifest.json", "{}"), ("manifest.json", "x")):
        foreign = tmp_path / f"foreign-{name}"
        foreign.mkdir(exist_ok=True)
        if content is None:
            foreign.rmdir()
            foreign.write_text("a file")
        else:
            (foreign / name).write_text(content)
        with pytest.raises(BundleError, match="is not an engine bundle; name another --out"):
            build(changed(options, out=foreign))
        assert (foreign if content is None else foreign / name).read_text() == (content or "a file")


def test_an_empty_directory_and_a_link_are_good_places(tmp_path: Path, options: BuildOptions) -> None:
    (tmp_path / "empty").mkdir()
    assert read_manifest(build(changed(options, out=tmp_path / "empty")))
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    build(changed(options, out=tmp_path / "link", precision="bf16"))
    assert (tmp_path / "link").is_symlink()
    assert read_manifest(tmp_path / "empty").precision == "bf16"


def test_a_filesystem_without_exchange(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    build(options)
    monkeypatch.setattr(publish.ctypes, "CDLL", lambda *args, **options: object())
    build(changed(options, precision="bf16"))
    assert read_manifest(options.out).precision == "bf16"
    assert not leftovers(options)


def test_a_build_that_fails_leaves_the_old_bundle(options: BuildOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    key = read_manifest(build(options)).key
    monkeypatch.setattr(bundle_module, "_emit_drafter", fail)
    with pytest.raises(RuntimeError, match="emitter failed"):
        build(changed(options, precision="bf16"))
    assert read_manifest(options.out).key == key
    assert not leftovers(options)


def fail(*args: Any) -> Any:
    raise RuntimeError("emitter failed")


def test_two_builders_of_one_directory_take_turns(options: BuildOptions) -> None:
    first = start_builder(options, stop_at="write the drafter")
    wait_for(first, "write the drafter")
    second = start_builder(options)
    wait_for(second, "read the checkpoints")
    time.sleep(0.5)
    assert second.poll() is None
    assert len(leftovers(options)) == 1  # the second neither builds nor clears away the first one's work
    first.kill()
    output, _ = second.communicate(timeout=60)
    first.wait(30)
    assert output.split("\n")[-2] == "done"
    assert not leftovers(options)
    verify_files(options.out, read_manifest(options.out))


def test_builders_that_start_together_build_once(options: BuildOptions) -> None:
    builders = [start_builder(options) for _ in range(3)]
    outputs = [builder.communicate(timeout=120)[0] for builder in builders]
    assert [output.count("done") for output in outputs] == [1, 1, 1]
    assert sum("write the target" in output for output in outputs) == 1


def test_leftovers_of_another_bundle_are_not_touched(options: BuildOptions) -> None:
    options.out.parent.mkdir()
    other = options.out.parent / ".bundle.build-b.build-abcdefgh"  # belongs to a bundle named "bundle.build-b"
    mine = options.out.parent / ".bundle.build-abcdefgh"
    other.mkdir()
    mine.mkdir()
    build(options)
    assert other.exists()
    assert not mine.exists()
