"""`dcut-trt build`: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoints import TARGET, write_drafter, write_target

from dcut_engines.build_options import BuildOptions
from dcut_engines.cli import add_build_parser, run_build
from dcut_trt.manifest import read_manifest


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCUT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    return ["--target", str(target), "--drafter", str(drafter), "--out", str(tmp_path / "bundle"), "--max-len", "64"]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dcut-trt")
    add_build_parser(parser.add_subparsers())
    return parser.parse_args(["build", *arguments])


def run(arguments: list[str]) -> int:
    args = parse(arguments)
    code = args.run(args)
    assert args.run is run_build
    assert isinstance(code, int)
    return code


def test_a_build_prints_one_line(tmp_path: Path, models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(models) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.startswith(f"{tmp_path / 'bundle'}: target + drafter, openvino fp32, ")
    assert printed.out.count("\n") == 1
    assert run(models) == 0  # found, not built


def test_options_reach_the_bundle(tmp_path: Path, models: list[str]) -> None:
    options = ["--precision", "bf16", "--max-batch", "3", "--ratios", "0.5, 1", "--draft-vocab", "20"]
    assert run([*models, *options]) == 0
    manifest = read_manifest(tmp_path / "bundle")
    assert (manifest.precision, manifest.max_batch, manifest.max_len) == ("bf16", 3, 64)
    assert (manifest.ratios, manifest.captured_batches) == ((0.5, 1.0), (1, 2, 3))
    assert manifest.drafter.draft_vocab_size == 20


def test_defaults_of_the_command_line_are_those_of_the_library(models: list[str]) -> None:
    args = parse(models)
    expected = BuildOptions(args.target, args.drafter, args.out, max_len=64)
    assert BuildOptions(**{name: getattr(args, name) for name in BuildOptions.__dataclass_fields__}) == expected


@pytest.mark.parametrize(
    ("text", "value"), [("none", "all"), ("own", "own"), ("8192", 8192), ("-1", -1), ("ids.json", Path("ids.json"))]
)
def test_draft_vocab_values(models: list[str], text: str, value: object) -> None:
    assert parse([*models, f"--draft-vocab={text}"]).draft_vocab == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-batch", "0"], "--max-batch 0: from 1 to 256"),
        (["--max-batch", "257"], "--max-batch 257: from 1 to 256"),
        (["--max-len", "0"], "--max-len 0: at least 1"),
        (["--max-len", "129"], "--max-len 129: the model's context is 128"),
        (["--max-len", "3"], "--max-len 3: at least one block of 4"),
        (["--ratios", "0,1"], "--ratios 0,1: 0 is not in (0, 1]"),
        (["--ratios", "0.5,1.01"], "--ratios 0.5,1.01: 1.01 is not in (0, 1]"),
        (["--ratios", "nan"], "--ratios nan: nan is not in (0, 1]"),
        (["--ratios=-1"], "--ratios -1: -1 is not in (0, 1]"),
        (["--ratios", "0.5,1,0.5"], "--ratios 0.5,1,0.5: a value is there twice"),
        (["--ratios", ",".join(f"0.{n:02}" for n in range(1, 18))], "from 1 to 16 values"),
        (["--draft-vocab", "0"], "--draft-vocab 0: at least 1 id"),
        (["--draft-vocab", "273"], "--draft-vocab 273: the vocabulary has 272 ids"),
        (["--draft-vocab", "/no/such.json"], "draft vocabulary /no/such.json cannot be read"),
        (["--target", "no-such-model"], "target 'no-such-model' was not found"),
        (["--drafter", "no-such-drafter"], "drafter 'no-such-drafter' was not found"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(
    tmp_path: Path, models: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*models, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("dcut-trt build: error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "cuda"], "argument --backend: invalid choice: 'cuda'"),
        (["--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        (["--max-batch", "many"], "argument --max-batch: 'many' is not an integer"),
        (["--max-len", "1e3"], "argument --max-len: '1e3' is not an integer"),
        (["--ratios", "half"], "argument --ratios: 'half' is not a comma-separated list of numbers in (0, 1]"),
        (["--ratios", ""], "argument --ratios: ''"),
    ],
)
def test_a_value_that_is_no_number_is_refused_by_name(
    models: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([*models, *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_drafter_for_another_target(tmp_path: Path, models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    other = write_target(tmp_path / "other", {**TARGET, "num_hidden_layers": 4})
    assert run([*models, "--target", str(other)]) == 2
    error = capsys.readouterr().err
    assert "drafter drafter (" in error
    assert "target other (" in error
    assert "num_target_layers is 2 for the drafter, 4 for the target" in error


def test_a_directory_that_is_no_bundle(tmp_path: Path, models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "thesis.tex").write_text("x")
    assert run(models) == 2
    assert "is not an engine bundle; name another --out" in capsys.readouterr().err
    assert (tmp_path / "bundle" / "thesis.tex").read_text() == "x"


def test_a_place_that_cannot_be_written(tmp_path: Path, models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert run([*models, "--out", str(tmp_path / "file" / "bundle")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_stages_are_shown_on_a_terminal(models: list[str]) -> None:
    master, slave = pty.openpty()
    code = "import argparse, sys; from dcut_engines import cli; p = argparse.ArgumentParser(); "
    code += "cli.add_build_parser(p.add_subparsers()); a = p.parse_args(sys.argv[1:]); sys.exit(a.run(a))"
    command = [sys.executable, "-c", code, "build", *models]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    shown = ""
    with subprocess.Popen(command, stderr=slave, stdout=subprocess.PIPE, env=environment) as builder:
        os.close(slave)
        # A terminal holds a few kilobytes: whoever reads only at the end misses what was shown last.
        with contextlib.suppress(OSError):  # Linux's way to say that nobody can write any more
            while part := os.read(master, 1 << 16):
                shown += part.decode(errors="replace")
        output = builder.stdout.read()
    os.close(master)
    assert builder.returncode == 0
    for stage in ("read the checkpoints", "write the target", "write the drafter", "hash the bundle"):
        assert stage in shown
    assert "0:00:0" in shown
    assert output.count(b"\n") == 1
