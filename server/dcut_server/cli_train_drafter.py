"""dcut-trt train-drafter: a DFlash drafter for a user's own target, from text that the target writes itself."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcut_engines.build_options import BuildOptions, InvalidOption
from dcut_trt.errors import DcutError

if TYPE_CHECKING:
    from dcut_engines.train.options import TrainOptions
    from dcut_engines.train.synthesis import SynthesisOptions

NEEDED = ("torch", "safetensors", "gguf")
TEXT_OPTIONS = ("prompt_seeds", "prompts", "temperature", "response_tokens")


class MissingExtra(DcutError):
    """An optional package is not installed."""


def add_train_drafter_parser(commands: Any) -> None:
    """Add `train-drafter`; run_train_drafter takes what it parses."""
    parser = commands.add_parser(
        "train-drafter",
        help="train a DFlash drafter for your own target",
        description="Train a DFlash block drafter. The output directory is what `dcut-trt build --drafter` takes.",
    )
    add = parser.add_argument
    add("--target", required=True, metavar="T", help="as for dcut-trt build")
    add("--out", required=True, type=Path, metavar="DIR", help="the drafter, its curve, checkpoints and features")
    add("--init", metavar="D", help="a drafter to continue from; without one: the target's own last layers")
    add("--block", type=int, metavar="N", help="8 or 16 positions, the anchor among them; default: 8")
    add("--layers", type=int, metavar="N", help="default: 3")
    add("--attention", choices=("causal", "bidirectional"), help="inside the block; default: causal")
    add("--draft-vocab", type=int, metavar="N", help="draft from the N most frequent ids; default: init's own, or all")
    text = parser.add_argument_group("text")
    add = text.add_argument
    add("--data", nargs="+", type=Path, default=[], metavar="FILE", help=".npz: tokens, lengths, response_start")
    add("--seen", nargs="+", type=Path, default=[], metavar="FILE", help="data that --init knows; none is held out")
    add("--tokens", type=int, default=0, metavar="N", help="response tokens for the target to write; default: 0")
    add("--prompt-seeds", type=Path, metavar="FILE", help="opening words of users' prompts, one per line")
    add("--prompts", type=Path, metavar="FILE", help="whole prompts to answer, one per line, instead of invented ones")
    add("--temperature", type=float, metavar="T", help="of the written responses; default: 0, greedy")
    add("--response-tokens", type=int, metavar="N", help="at most, of each response; default: 256")
    add("--max-len", type=int, default=512, metavar="N", help="tokens kept of each sequence; default: 512")
    add("--held-out", type=float, default=0.03, metavar="F", help="of the sequences, to measure on; default: 0.03")
    pace = parser.add_argument_group("training")
    add = pace.add_argument
    add("--steps", type=int, metavar="N", help="end after N steps")
    add("--minutes", type=float, metavar="M", help="end after M minutes of training")
    add("--learning-rate", type=float, default=8e-4, metavar="R", help="highest, of a cosine to 0; default: 8e-4")
    add("--gamma", type=float, metavar="G", help="weight exp(-(k-1)/G) of offset k; default: 4 for block 8, 7 for 16")
    add("--sequences", type=int, default=8, metavar="N", help="of one step; default: 8")
    add("--anchors", type=int, default=32, metavar="N", help="blocks of one sequence in a step; default: 32")
    add("--evaluate-every", type=int, default=100, metavar="N", help="steps between checkpoints; default: 100")
    add("--precision", choices=("fp32", "bf16"), default="bf16", help="of products; weights stay fp32; default: bf16")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU where torch sees one")
    add("--threads", type=int, metavar="N", help="CPU threads; on shared cores fewer may be faster")
    add("--seed", type=int, default=0, help="default: 0")
    add("--resume", action="store_true", help="continue the training in --out where its last checkpoint was")


def run_train_drafter(args: argparse.Namespace) -> int:
    """Raises DcutError for what cannot be trained."""
    options, text = train_options(args), text_options(args)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(f"train-drafter needs {missing[0]}: pip install 'dcut-trt[train]'")
    from dcut_engines.train.run import train  # noqa: PLC0415 - loads torch

    def synthesise(drafter: Path) -> Sequence[Path]:
        return write_text(args, text, drafter)

    acceptance = train(options, synthesise, lambda line: print(line, flush=True))
    print(f"{options.out}: tau {acceptance.tau:.2f} on {acceptance.blocks:,} held-out blocks")
    print(f"dcut-trt build --target {options.target} --drafter {options.out} --out DIR")
    return 0


def train_options(args: argparse.Namespace) -> TrainOptions:
    """Raises InvalidOption."""
    from dcut_engines.train.options import TrainOptions  # noqa: PLC0415

    given = {name: value for name, value in vars(args).items() if name in TrainOptions.__dataclass_fields__}
    return TrainOptions(**given | {"data": tuple(args.data), "seen": tuple(args.seen)})


def text_options(args: argparse.Namespace) -> SynthesisOptions:
    """What the target is to write. Raises InvalidOption, also for an option of text when none is to be written."""
    from dcut_engines.train.synthesis import SynthesisOptions, read_lines  # noqa: PLC0415

    for name in TEXT_OPTIONS:
        if getattr(args, name) is not None and not args.tokens:
            raise InvalidOption(f"--{name.replace('_', '-')}", getattr(args, name), "only with --tokens")
    if args.prompt_seeds is not None and args.prompts is not None:
        raise InvalidOption("--prompt-seeds", args.prompt_seeds, "not with --prompts, which invents none")
    temperature = 0.0 if args.temperature is None else args.temperature
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidOption("--temperature", temperature, "0, greedy, or more")
    response_tokens = 256 if args.response_tokens is None else args.response_tokens
    if response_tokens < 2:
        raise InvalidOption("--response-tokens", response_tokens, "at least 2")
    return SynthesisOptions(
        tokens=args.tokens,
        response_tokens=response_tokens,
        temperature=temperature,
        seeds=read_lines("--prompt-seeds", args.prompt_seeds) if args.prompt_seeds else (),
        prompts=read_lines("--prompts", args.prompts) if args.prompts else (),
        seed=args.seed,
    )


def write_text(args: argparse.Namespace, options: SynthesisOptions, drafter: Path) -> Sequence[Path]:
    """Let the target write training text on an engine of its own. drafter: any that fits; it does not draft here."""
    from dcut_engines.bundle import build  # noqa: PLC0415
    from dcut_engines.train.synthesis import synthesise  # noqa: PLC0415
    from dcut_server.compose import open_engine  # noqa: PLC0415
    from dcut_trt.config import EngineOptions  # noqa: PLC0415

    bundle = build(
        BuildOptions(args.target, str(drafter), args.out / "bundle", precision=args.precision, max_len=args.max_len)
    )
    engine = open_engine(bundle, EngineOptions(policy="plain", profile=False, threads=args.threads))
    said = 0

    def progress(done: int, total: int) -> None:
        nonlocal said
        if done - said >= total / 20 or said < done == total:
            said = done
            print(f"{done:,} / {total:,} response tokens written", flush=True)

    try:
        return synthesise(engine, options, args.out / "data", progress)
    finally:
        engine.close()
