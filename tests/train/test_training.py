"""A whole training of a tiny drafter: it learns, resumes exactly, and what comes out is built and served."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoints import QWEN3, write_safetensors, write_target

from dcut_engines.build_options import BuildOptions
from dcut_engines.bundle import build
from dcut_engines.drafter_checkpoint import load_drafter
from dcut_engines.hf_config import read_decoder_config
from dcut_engines.sources import Source
from dcut_engines.train.training import Training
from dcut_engines.weights import decoder_shapes
from dcut_server.cli import main
from dcut_server.compose import open_engine
from dcut_trt.config import EngineOptions
from dcut_trt.types import Request


class Stopped(Exception):
    """The process ends between two checkpoints."""


CYCLE = np.arange(40, 46)
FAST = ("--threads", "1", "--max-len", "64", "--sequences", "4", "--anchors", "8", "--held-out", "0.2")
FAST += ("--learning-rate", "5e-3", "--evaluate-every", "20")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whatever it reads, it soon writes CYCLE over and over: behind each of these ids the head wants the next."""
    folder = write_target(tmp_path_factory.mktemp("target") / "tiny", {**QWEN3, "num_hidden_layers": 3})
    rng = np.random.default_rng(3)
    arrays = {
        name: np.ones(shape) if "norm" in name else rng.normal(0, 0.02, shape)
        for name, shape in decoder_shapes(read_decoder_config(folder)).items()
    }
    embedding = rng.normal(0, 1, arrays["model.embed_tokens.weight"].shape)
    arrays["lm_head.weight"][np.roll(CYCLE, -1)] = embedding[CYCLE]
    write_safetensors(folder / "model.safetensors", arrays | {"model.embed_tokens.weight": embedding})
    return folder


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From the target alone: it writes the text, and the drafter learns 60 steps of it."""
    out = tmp_path_factory.mktemp("trained") / "drafter"
    words = out.parent / "words"
    words.write_text("\n".join(f"{number} times" for number in range(40)))
    sizes = ("--tokens", "1500", "--response-tokens", "30", "--steps", "60", "--layers", "1", "--draft-vocab", "200")
    arguments = [*sizes, "--prompt-seeds", str(words)]
    assert main(["train-drafter", "--target", str(target), "--out", str(out), *FAST, *arguments]) == 0
    return out


def train(target: Path, out: Path, text: Path, *arguments: str) -> int:
    files = [str(file) for file in sorted((text / "data").glob("*.npz"))]
    return main(["train-drafter", "--target", str(target), "--out", str(out), "--data", *files, *FAST, *arguments])


def curve(out: Path) -> list[dict[str, str]]:
    with (out / "curve.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_loss_falls_and_held_out_acceptance_rises(trained: Path) -> None:
    points = curve(trained)
    assert [int(point["step"]) for point in points] == [0, 20, 40, 60]
    assert float(points[-1]["loss"]) < 0.7 * float(points[1]["loss"])
    assert float(points[-1]["tau"]) > float(points[0]["tau"]) + 0.5


def test_what_was_trained_is_built_and_serves_what_it_was_measured_at(
    trained: Path, target: Path, tmp_path: Path
) -> None:
    bundle = build(BuildOptions(str(target), str(trained), tmp_path / "bundle", max_batch=4, max_len=64))
    engine = open_engine(bundle, EngineOptions(policy="dflash", profile=False))
    try:
        prompts = ["the", "a b", "hello", "tt"]
        for number, text in enumerate(prompts):
            ids = engine.tokenizer.encode(engine.tokenizer.render_chat([{"role": "user", "content": text}]))
            engine.submit(Request(f"{number}", tuple(ids), 30, ignore_eos=True))
        events = []
        while engine.has_work:
            events += engine.step()
    finally:
        engine.close()
    finals = [event.usage for event in events if event.final]
    served = 1 + sum(usage.accepted for usage in finals) / sum(usage.steps for usage in finals)
    measured = json.loads((trained / "training.json").read_text())["measured"]["trained"]["decoded_tau"]
    assert served > 1.3
    assert served == pytest.approx(measured, rel=0.5)


def test_the_card_and_the_checkpoint_say_what_it_is(trained: Path) -> None:
    drafter = load_drafter(Source("tiny", trained))
    assert (drafter.config.block_size, drafter.config.layers, drafter.config.causal) == (8, 1, True)
    assert drafter.pin.name == "tiny"
    assert drafter.draft_vocab is not None
    assert len(drafter.draft_vocab) == 200
    card = (trained / "README.md").read_text()
    assert "A DFlash drafter for tiny" in card
    assert "| trained | " in card


def test_a_training_in_two_parts_equals_one_in_one(trained: Path, target: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for out in (whole, parts):
        out.mkdir()
        shutil.copytree(trained / "features", out / "features")
    assert train(target, whole, trained, "--steps", "40", "--layers", "2") == 0
    step = Training._train_step

    def stopping(self: Training, learning_rate: float) -> float:
        if self.step == 29:
            raise Stopped
        return step(self, learning_rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "_train_step", stopping)
        with pytest.raises(Stopped):
            train(target, parts, trained, "--steps", "40", "--layers", "2")
    assert torch.load(parts / "checkpoint.pt", weights_only=True)["step"] == 20
    assert train(target, parts, trained, "--steps", "40", "--layers", "2", "--resume") == 0
    states = [torch.load(out / "checkpoint.pt", weights_only=True) for out in (whole, parts)]
    for name, tensor in states[0]["weights"].items():
        assert torch.equal(tensor, states[1]["weights"][name]), name
    assert [point[4:] for point in states[0]["curve"]] == [point[4:] for point in states[1]["curve"]]


def test_continuing_keeps_the_drafters_shape_and_reports_both(
    trained: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "more"
    assert train(target, out, trained, "--init", str(trained), "--steps", "3") == 0
    before, after = (load_drafter(Source("tiny", folder)) for folder in (trained, out))
    assert (after.config, after.draft_vocab) == (before.config, before.draft_vocab)
    measured = json.loads((out / "training.json").read_text())["measured"]
    assert set(measured) == {"before", "trained"}
    assert any(not np.array_equal(after.weights[name], before.weights[name]) for name in after.weights)
    assert train(target, out, trained, "--init", str(trained), "--steps", "4") == 2
    assert "--resume continues its training" in capsys.readouterr().err
    assert train(target, out, trained, "--init", str(trained), "--steps", "4", "--resume") == 2
    assert "limit was 3 steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "5"], "--data (none): a file, or --tokens N"),
        (["--data", "x.npz"], "--steps (none): or --minutes"),
        (["--data", "x.npz", "--minutes", "0"], "--minutes 0.0: more than 0"),
        (["--data", "x.npz", "--steps", "5", "--block", "9"], "--block 9: 8 or 16"),
        (["--data", "x.npz", "--steps", "5", "--layers", "0"], "--layers 0: at least 1"),
        (["--data", "x.npz", "--steps", "5", "--layers", "4"], "--layers 4: the target has 3"),
        (["--data", "x.npz", "--steps", "5", "--init", "d", "--layers", "2"], "--layers 2: only without --init"),
        (["--data", "x.npz", "--steps", "5", "--seen", "y.npz"], "--seen y.npz: only with --init"),
        (["--data", "x.npz", "--steps", "5", "--prompt-seeds", "w"], "--prompt-seeds w: only with --tokens"),
        (["--data", "x.npz", "--steps", "5", "--prompts", "w"], "--prompts w: only with --tokens"),
        (["--data", "x.npz", "--steps", "5", "--temperature", "1"], "--temperature 1.0: only with --tokens"),
        (["--tokens", "9", "--steps", "5", "--prompts", "none"], "--prompts none: cannot be read"),
        (["--tokens", "9", "--steps", "5", "--prompts", "w", "--prompt-seeds", "v"], "--prompt-seeds v: not with"),
        (["--tokens", "9", "--steps", "5", "--temperature", "-1"], "--temperature -1.0: 0, greedy, or more"),
        (["--tokens", "9", "--steps", "5", "--response-tokens", "1"], "--response-tokens 1: at least 2"),
        (["--data", "x.npz", "--steps", "5", "--held-out", "1"], "--held-out 1.0: more than 0"),
        (["--data", "x.npz", "--steps", "5", "--max-len", "4096"], "--max-len 4096: the model's context is 128"),
        (["--data", "x.npz", "--steps", "5", "--max-len", "64"], "training data x.npz cannot be read"),
    ],
)
def test_options_that_cannot_be_met_are_refused_by_name(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    base = ["train-drafter", "--target", str(target), "--out", str(tmp_path / "out"), *arguments]
    if "--max-len" not in arguments:
        base += ["--max-len", "64"]
    assert main(base) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(
    target: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert train(target, tmp_path / "out", trained, "--steps", "1", "--device", "cuda") == 2
    assert "--device cuda: torch sees no GPU here" in capsys.readouterr().err


def test_without_torch_one_line_says_what_to_install(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    command = ["train-drafter", "--target", str(target), "--out", str(tmp_path / "out"), "--data", "x", "--steps", "1"]
    assert main(command) == 2
    assert capsys.readouterr().err == "dcut-trt: train-drafter needs torch: pip install 'dcut-trt[train]'\n"
