"""`dcut-trt build --dry-run`: from config files alone, the memory that a build will need, and what it would refuse."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_checkpoints import DRAFTER, TARGET, write_config, write_drafter
from tiny_plans import rtx_options

from dcut_engines.bundle import build
from dcut_engines.cli import add_build_parser
from dcut_engines.dry_run import estimate, render
from dcut_trt.manifest import read_manifest

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B_DFLASH = {
    **{name: value for name, value in QWEN3_8B.items() if name not in ("architectures", "use_sliding_window")},
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
LARGE = ["--backend", "tensorrt", "--precision", "bf16", "--max-batch", "64", "--max-len", "8192"]


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    (tmp_path / "qwen3-8b").mkdir()
    write_config(tmp_path / "qwen3-8b", QWEN3_8B)
    return tmp_path / "qwen3-8b"


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    (tmp_path / "dflash").mkdir()
    write_config(tmp_path / "dflash", QWEN3_8B_DFLASH)
    return tmp_path / "dflash"


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser(prog="dcut-trt")
    add_build_parser(parser.add_subparsers())
    args = parser.parse_args(["build", "--dry-run", *map(str, arguments)])
    code = args.run(args)
    assert isinstance(code, int)
    return code


def test_a_large_model_from_its_config_alone(
    qwen3: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run("--target", qwen3, *LARGE) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "qwen3-8b + DFlash's default (5 layers), blocks of 16: tensorrt bf16, 64 requests of 8192 tokens" in printed
    assert "target verify-1024 1024 1..64 16 1024 0..1024" in printed
    assert "target decode 1..64 1..64 1 1..64 0..64" in printed
    assert "target prefill 1..256 1 1..256 1..2 0..1" in printed
    assert "drafter draft-64 33..64 32 1..1024" in printed
    # 36 layers of keys and values, 8 heads of 128, 8192 + 2 * 16 slots, two bytes each
    assert 36 * 2 * 8 * 128 * 8224 * 2 == 1_212_678_144
    assert "target KV cache, per request of 8224 slots 1.21 GB" in printed
    assert "KV caches, 64 requests 88.39 GB" in printed  # (36 + 5) / 36 of 77.6 GB
    assert "target plan, 18 profiles 16.71 GB" in printed  # 8.19 billion weights
    assert "in all, without scratch memory 109.74 GB" in printed


def test_a_drafter_of_its_own(qwen3: Path, drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--target", qwen3, "--drafter", drafter, *LARGE, "--draft-vocab", "32768") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "qwen3-8b + dflash, blocks of 16" in printed
    assert "drafter plan, 8 profiles 3.66 GB" in printed  # 119,168 rows of 4096 fewer than the whole head


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-len", "50000"], "--max-len 50000: the model's context is 40960"),
        (["--max-batch", "300"], "--max-batch 300: from 1 to 256"),
        (["--precision", "fp32"], "--precision fp32: fp16 or bf16 with --backend tensorrt"),
        (["--backend", "tensorrt-rtx", "--compute-capability", "9.0"], "9.0: tensorrt-rtx supports 7.5"),
        (["--backend", "tensorrt-rtx", "--compute-capability", "7.5"], "compute capability 7.5 has no bf16"),
        (
            ["--backend", "openvino", "--precision", "fp32"],
            "--dry-run openvino: with --backend tensorrt or",
        ),
        (["--draft-vocab", "200000"], "--draft-vocab 200000: the vocabulary has 151936 ids"),
        (["--drafter", "/no/such"], "drafter '/no/such': --dry-run reads the config.json of a local directory"),
        (["--target", "Qwen/Qwen3-8B"], "target 'Qwen/Qwen3-8B': --dry-run reads the config.json of a local directory"),
    ],
)
def test_it_refuses_what_a_build_refuses(
    qwen3: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--target", qwen3, *LARGE, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_target_layers": 35, "dflash_config": {"mask_token_id": 0, "target_layer_ids": [1]}},
            "num_target_layers",
        ),
        ({"hidden_size": 2048}, "hidden_size is 2048 for the drafter, 4096 for the target"),
        ({"head_dim": 8}, "drafter: head_dim=8"),
        ({"block_size": 64}, "batch=65, draft length=63"),
    ],
)
def test_it_refuses_a_drafter_that_a_build_refuses(
    qwen3: Path, drafter: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(drafter, {**QWEN3_8B_DFLASH, **changes})
    assert run("--target", qwen3, "--drafter", drafter, *LARGE, "--max-batch", "65") == 2
    assert message in capsys.readouterr().err


def test_only_a_dry_run_goes_without_a_drafter_and_a_place(qwen3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_build_parser(parser.add_subparsers())
    for given, missing in (([], "--drafter"), (["--drafter", "d"], "--out")):
        args = parser.parse_args(["build", "--target", str(qwen3), *given])
        assert args.run(args) == 2
        assert f"{missing} (none): needed, except with --dry-run" in capsys.readouterr().err


def test_the_estimate_is_close_to_what_a_build_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCUT_CACHE", str(tmp_path / "cache"))
    options = rtx_options(tmp_path, ratios=(0.25, 1.0))
    expected = estimate(options)
    manifest = read_manifest(build(options))
    for name, plan in manifest.plans.items():
        assert expected.networks[name].profiles == plan.profiles
        assert expected.networks[name].plan_bytes == pytest.approx(plan.size, rel=0.2)
    assert expected.slots == manifest.cache_slots


def test_a_drafter_with_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    whole = rtx_options(tmp_path)
    own = write_drafter(tmp_path / "own", {**DRAFTER, "head_dim": 16}, draft_vocab=[1, 2, 3])
    few = rtx_options(tmp_path / "again", drafter=str(own))
    # The tied head is the embedding; a subset of it is a second table.
    extra = estimate(few).networks["drafter"].plan_bytes - estimate(whole).networks["drafter"].plan_bytes
    assert extra == 2 * 3 * TARGET["hidden_size"]
    (own / "draft_vocab.json").write_text(json.dumps([5] * 2))
    with pytest.raises(Exception, match="1 ids are there twice"):
        estimate(few)


def test_tables_fit_a_narrow_terminal(tmp_path: Path) -> None:
    console = Console(width=80, record=True)
    console.print(render(estimate(rtx_options(tmp_path, max_batch=256, max_len=128))))
    assert "verify-1024" in console.export_text()
