"""The command line, without a network and without a model."""

from __future__ import annotations

import hashlib
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dcut_server import cli
from dcut_server.cli_generate import generate
from dcut_server.report import usage_line
from dcut_server.stats import stats_line
from dcut_trt.backends.scripted import byte_tokenizer, scripted_engine
from dcut_trt.config import EngineOptions
from dcut_trt.engine import Engine
from dcut_trt.errors import EngineMismatch
from dcut_trt.manifest import DrafterSpec, FileSpec, Manifest, TargetSpec, TokenizerSpec
from dcut_trt.metrics import StepRecord, Totals
from dcut_trt.spec.cost_table import ContextCost, CostTable, save_cost_table
from dcut_trt.types import FinishReason, Request, Usage


@pytest.fixture
def compose(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands in for dcut_server.compose, with the scripted model; remembers what it was asked to open."""
    module = ModuleType("dcut_server.compose")

    def open_engine(bundle: Path, options: EngineOptions, *_: Any) -> Engine:
        module.asked = (bundle, options)
        return scripted_engine()

    module.open_engine = open_engine
    module.COST_TABLE_NAME = "cost_table.json"
    monkeypatch.setitem(sys.modules, "dcut_server.compose", module)
    return module


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "target.bin").write_bytes(b"weights")
    manifest = Manifest(
        schema=1,
        key="0123456789abcdef",
        backend="openvino",
        precision="bf16",
        target=TargetSpec("SmolLM2-135M", "ab" * 32, "llama", 30, 576, 9, 3, 64, 49152, 8192),
        drafter=DrafterSpec("our-drafter", "cd" * 32, 2, 3, 64, 8, 0, (2, 14, 27), True, 49152),
        tokenizer=TokenizerSpec("ef" * 32, 49152, None, (2,)),
        draft_length=7,
        ratios=(0.25, 0.5, 0.75, 1.0),
        captured_batches=(1, 8),
        token_buckets=(2, 4, 64),
        max_batch=8,
        max_len=512,
        tensors={},
        files={"target.bin": FileSpec(7, hashlib.sha256(b"weights").hexdigest())},
        versions={"openvino": "2026.4.1"},
    )
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    return tmp_path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("dcut-trt 0.")


@pytest.mark.parametrize("command", ["serve", "client", "generate", "inspect"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"dcut-trt {command}" in capsys.readouterr().out


def test_generate_prints_what_the_engine_says(compose: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--raw", "--max-tokens", "30", "--seed", "3", "--temperature", "0.5", "--policy", "ratio:0.5"]
    flags += ["--threads", "2", "--no-profile", "--no-prefix-cache", "--busy-prefill-chunk", "32"]
    assert cli.main(["generate", "some/bundle", "Hello", *flags]) == 0
    options = EngineOptions(policy="ratio:0.5", threads=2, profile=False, prefix_cache=False, busy_prefill_chunk=32)
    assert compose.asked == (Path("some/bundle"), options)
    output = capsys.readouterr()
    assert output.out.endswith("\n")
    assert "tokens in" in output.err
    again = cli.main(["generate", "some/bundle", "Hello", *flags])
    assert (again, capsys.readouterr().out) == (0, output.out)


def test_generate_reads_stdin_and_renders_chat(
    compose: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    assert cli.main(["generate", "b", "--max-tokens", "20"]) == 0
    ids = tuple(byte_tokenizer().encode("user: Hi\nassistant: "))
    events = list(generate(scripted_engine(), Request("r", ids, 20)))
    assert capsys.readouterr().out == "".join(event.text for event in events) + "\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-tokens", "0"], "max_tokens=0: must be at least 1"),
        (["--temperature", "nan"], "sampling.temperature=nan"),
        (["--threads", "0"], "threads=0: must be at least 1"),
    ],
)
def test_a_typed_error_is_one_line_and_exit_code_2(
    compose: ModuleType, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "b", "Hello", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dcut-trt: ")
    assert words in error
    assert error.count("\n") == 1


def test_an_error_of_several_lines_becomes_one(
    compose: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Engine:
        raise EngineMismatch("built for A,\n  this is B")

    monkeypatch.setattr(compose, "open_engine", fail)
    assert cli.main(["generate", "b", "Hello"]) == 2
    assert capsys.readouterr().err == "dcut-trt: built for A, this is B\n"


def test_serve_refuses_a_directory_without_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "manifest.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--port=65536", "--port=-1", "--grace-seconds=-1", "--grace-seconds=nan"])
def test_serve_refuses_impossible_options(flag: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", str(bundle), flag]) == 2
    assert flag[2:].partition("=")[0].replace("-", "_") in capsys.readouterr().err


def test_inspect_shows_a_whole_bundle(compose: ModuleType, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(bundle)]) == 0
    output = capsys.readouterr().out
    for word in ("SmolLM2-135M", "our-drafter", "target.bin", "ok", "not measured yet"):
        assert word in output
    costs = CostTable((1, 8), (0.5, 1.0), np.array([[1.5, 2.5], [3, 6]]), np.array([1.0, 2]), "this CPU", "2026-11-30")
    save_cost_table(costs, bundle / "cost_table.json")
    assert cli.main(["inspect", str(bundle)]) == 0
    output = capsys.readouterr().out
    for word in ("50%", "100%", "6.00", "this CPU", "2026-11-30"):
        assert word in output


def test_inspect_shows_every_cost_that_a_table_holds(
    compose: ModuleType, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = CostTable(
        (1, 8),
        (0.5, 1.0),
        np.array([[1.5, 2.5], [3, 6]]),
        None,
        "this CPU",
        "2026-11-30",
        depths=(1, 7),
        draft_ms=np.array([[0.25, 0.5], [1.25, 2.75]]),
        context_ms=ContextCost(plain=1.01, request=2.02, row=3.03),
        context_rows=123.0,
        switch_ms=4.04,
    )
    path = tmp_path / "costs.json"
    save_cost_table(costs, path)
    assert cli.main(["inspect", str(bundle), "--cost-table", str(path)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    for word in ("not measured", "draft 7", "2.75", "1.01 ms", "2.02 ms", "3.03 ms", "123 rows", "4.04 ms"):
        assert word in output


def test_inspect_names_an_altered_file(compose: ModuleType, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "target.bin").write_bytes(b"weighTs")
    assert cli.main(["inspect", str(bundle)]) == 2
    assert "sha256" in capsys.readouterr().out


def test_usage_line() -> None:
    line = usage_line(Usage(5, 48, 16, 112, 60, 32), FinishReason.STOP, 0.5)
    assert line == (
        "48 tokens in 16 steps (3.0 per step), 0.50 s, 96.0 tokens/s, stop; "
        "drafts: 112 proposed, 52 pruned, 60 verified, 32 accepted"
    )
    assert "0 tokens in 0 steps (0.0 per step)" in usage_line(Usage(5, 0, 0, 0, 0, 0), FinishReason.ABORTED, 0.0)


def test_stats_line() -> None:
    record = StepRecord(
        kind="decode",
        batch=2,
        rows=8,
        possible=16,
        kept=6,
        accepted=3,
        emitted=5,
        ratio=0.5,
        draft_ms=1.0,
        select_ms=0.1,
        verify_ms=2.0,
        network_ms=2.9,
        step_ms=4.0,
    )
    before, after = Totals(steps=1), Totals(steps=2, output_tokens=5, drafted=14, verified=6, accepted=3)
    assert stats_line(2, 1, before, after, [record], 0.5) == (
        "running 2 waiting 1 | 10.0 tokens/s | ratio 0.5 | kept 6 of 14 drafts | accepted 3"
    )
    assert "ratio -" in stats_line(0, 0, before, after, [], 1.0)
