"""S14: a drafter of another target or tokenizer is refused with both names and hashes, before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_bundles import changed, tiny_options
from tiny_checkpoints import DRAFTER, TARGET, write_drafter, write_target

from dcut_engines.bundle import build
from dcut_engines.checkpoint import TargetCheckpoint, load_target
from dcut_engines.drafter_checkpoint import DrafterCheckpoint, check_drafter_fits, load_drafter
from dcut_engines.sources import Source, resolve_drafter, resolve_target
from dcut_trt.errors import DrafterMismatch

FLASH = DRAFTER["dflash_config"]


def load(directory: Path) -> DrafterCheckpoint:
    return load_drafter(Source(directory.name, directory))


def load_tiny_target(directory: Path, **fields: Any) -> TargetCheckpoint:
    return load_target(Source(directory.name, write_target(directory, {**TARGET, **fields})))


@pytest.mark.parametrize(
    ("of_target", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 32 for the drafter, 64 for the target"),
        ({"vocab_size": 300}, "vocab_size is 272 for the drafter, 300 for the target"),
        ({"num_hidden_layers": 3}, "num_target_layers is 2 for the drafter, 3 for the target"),
    ],
)
def test_s14_a_target_of_other_shapes_is_refused(tmp_path: Path, of_target: dict[str, Any], message: str) -> None:
    target = load_tiny_target(tmp_path / "wrong-target", **of_target)
    drafter = load(write_drafter(tmp_path / "my-drafter"))
    with pytest.raises(DrafterMismatch) as caught:
        check_drafter_fits(drafter, target)
    text = str(caught.value)
    assert message in text
    assert f"drafter my-drafter ({drafter.sha256[:12]})" in text
    assert f"target wrong-target ({target.sha256[:12]})" in text


@pytest.mark.parametrize("field", ["sha256", "tokenizer_sha256"])
def test_s14_a_target_of_the_same_shapes_is_refused_by_its_pin(tmp_path: Path, field: str) -> None:
    target = load_tiny_target(tmp_path / "tiny")
    right = {"sha256": target.sha256, "tokenizer_sha256": target.tokenizer.vocabulary_sha256}
    pin = {"name": "Tiny-Instruct", **right}
    drafter = load(write_drafter(tmp_path / "right", {**DRAFTER, "dflash_config": {**FLASH, "target": pin}}))
    check_drafter_fits(drafter, target)
    wrong = {**DRAFTER, "dflash_config": {**FLASH, "target": {**pin, field: "0" * 64}}}
    with pytest.raises(DrafterMismatch) as caught:
        check_drafter_fits(load(write_drafter(tmp_path / "wrong", wrong)), target)
    text = str(caught.value)
    assert "drafter wrong (" in text
    assert "trained for Tiny-Instruct, does not fit target tiny (" in text
    assert "0" * 64 in text
    assert right[field] in text


def test_s14_the_shipped_drafter_refuses_another_vocabulary_of_the_same_shape(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    data = smollm2_gguf.read_bytes()
    swapped = data.replace(b"<gh_stars>", b"<gh_moons>", 1)
    assert swapped != data
    (tmp_path / "impostor.gguf").write_bytes(swapped)
    drafter = load_drafter(resolve_drafter("smollm2-135m-dflash-b8"))
    with pytest.raises(DrafterMismatch, match=r"SmolLM2-135M-Instruct.*target impostor \(.*tokenizer sha256"):
        check_drafter_fits(drafter, load_target(resolve_target(str(tmp_path / "impostor.gguf"))))


def test_s14_a_drafter_for_another_target_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCUT_CACHE", str(tmp_path / "cache"))
    options = tiny_options(tmp_path)
    other = write_target(tmp_path / "other-target", {**TARGET, "num_hidden_layers": 3})
    with pytest.raises(
        DrafterMismatch, match=r"drafter drafter \(\w{12}\) does not fit target other-target \(\w{12}\)"
    ):
        build(changed(options, target=str(other)))
    assert not options.out.exists()
