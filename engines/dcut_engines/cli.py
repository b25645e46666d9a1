"""`dcut-trt build`: arguments, progress on a terminal, and errors as one line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dcut_engines.build_options import (
    DEFAULT_PREFILL_CHUNK,
    MAX_BATCH,
    PRECISIONS,
    BuildOptions,
    DraftVocab,
    InvalidOption,
)
from dcut_engines.build_progress import Report
from dcut_trt.errors import DcutError
from dcut_trt.manifest import read_manifest

if TYPE_CHECKING:
    from argparse import _SubParsersAction

REFUSED, FAILED = 2, 1  # exit codes: what was asked cannot be built; the machine could not build it
MEGABYTE = 1e6
STAND_INS: dict[str, Any] = {"drafter": "", "out": Path()}
BACKEND_HELP = "openvino (default): CPU; tensorrt, tensorrt-rtx: NVIDIA GPUs; onnx: what these two are compiled from"
DRAFT_VOCAB_HELP = "ids to draft from: the first N, a JSON list, all (none), or the drafter's own list (default)"


def add_build_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `build` to the commands of dcut-trt; run_build takes what it parses."""
    parser = subparsers.add_parser(
        "build",
        help="build an engine bundle from a target and its drafter",
        description="Build an engine bundle. The same inputs and options find the bundle that is already there.",
    )
    add = parser.add_argument
    add("--target", required=True, metavar="T", help="a directory, a .gguf file, smollm2-135m-instruct, or a hub id")
    add("--drafter", metavar="D", help="a DFlash directory, smollm2-135m-dflash-b8, or a hub id")
    add("--out", type=Path, metavar="DIR", help="the bundle's directory")
    add("--backend", choices=tuple(PRECISIONS), default="openvino", help=BACKEND_HELP)
    add("--precision", choices=("fp32", "fp16", "bf16"), default="fp32", help="of the networks; default: fp32")
    add("--max-batch", type=_integer, default=32, metavar="B", help=f"concurrent requests, to {MAX_BATCH}; default: 32")
    add("--max-len", type=_integer, default=2048, metavar="N", help="tokens per request with its output; default: 2048")
    add("--ratios", type=_ratios, default="0.25,0.5,0.75,1", metavar="R,..", help="default: 0.25,0.5,0.75,1")
    add("--draft-vocab", type=_draft_vocab, default="own", metavar="N|FILE|none|own", help=DRAFT_VOCAB_HELP)
    plans = parser.add_argument_group("plans", "of --backend tensorrt and tensorrt-rtx")
    add = plans.add_argument
    add("--compute-capability", metavar="M.N", help="of the GPU to compile for, such as 8.9; default: the local GPU's")
    add("--prefill-chunk", type=_integer, metavar="N", help=f"rows of a prefill; default: {DEFAULT_PREFILL_CHUNK}")
    add("--workspace-mib", type=_integer, metavar="N", help="scratch memory of a layer; default: TensorRT's limit")
    add("--dry-run", action="store_true", help="print profiles and memory from the models' config.json; build nothing")
    parser.set_defaults(run=run_build)
    return parser


def run_build(args: argparse.Namespace) -> int:
    """Build what the parsed arguments ask for; 0 when the bundle is there, 2 when refused, 1 when it failed."""
    from dcut_engines.bundle import build  # noqa: PLC0415  # the other commands should not pay for this import

    started = time.monotonic()
    try:
        if args.dry_run:
            return _dry_run(args)
        out = build(_options(args), _terminal_progress)
    except DcutError as error:
        return _fail(error, REFUSED)
    except ModuleNotFoundError as error:
        return _fail(f"{error}; the build needs: pip install 'dcut-trt[build]'", FAILED)
    except OSError as error:
        return _fail(error, FAILED)
    manifest = read_manifest(out)
    size = sum(file.size for file in manifest.files.values()) / MEGABYTE
    print(
        f"{out}: {manifest.target.identity} + {manifest.drafter.identity}, {manifest.backend} {manifest.precision}, "
        f"{size:.0f} MB, {time.monotonic() - started:.1f} s"
    )
    return 0


def _dry_run(args: argparse.Namespace) -> int:
    from dcut_engines.dry_run import estimate, render  # noqa: PLC0415

    Console().print(render(estimate(_options(args))))
    return 0


def _options(args: argparse.Namespace) -> BuildOptions:
    """Raises InvalidOption. A dry run writes nothing, and takes DFlash's default where no drafter is named."""
    given = {name: value for name, value in vars(args).items() if name in BuildOptions.__dataclass_fields__}
    missing = [name for name in ("drafter", "out") if given[name] is None]
    if missing and not args.dry_run:
        raise InvalidOption(f"--{missing[0]}", "(none)", "needed, except with --dry-run")
    return BuildOptions(**given | {name: STAND_INS[name] for name in missing})


def _fail(error: Any, code: int) -> int:
    print(f"dcut-trt build: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


@contextmanager
def _terminal_progress(stage: str) -> Iterator[Report | None]:
    """Show a stage and its elapsed time on a terminal; elsewhere say nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    spinner, name = SpinnerColumn(finished_text="[green]done[/]"), TextColumn("{task.description}")
    with Progress(spinner, name, BarColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(stage, total=None)
        yield lambda done: progress.update(task, completed=done, total=1)
        progress.update(task, completed=1, total=1)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _ratios(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of numbers in (0, 1]") from None


def _draft_vocab(text: str) -> DraftVocab:
    if text == "none":
        return "all"
    if text == "own":
        return "own"
    return int(text) if text.lstrip("-").isdigit() else Path(text)
