"""What a training is asked for, checked before any work is done."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dcut_engines.build_options import InvalidOption

BLOCK_SIZES = (8, 16)
GAMMA = {8: 4.0, 16: 7.0}  # DFlash's, for exp(-(k - 1) / gamma)
DEFAULT_LAYERS, DEFAULT_BLOCK = 3, 8


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """target: as `dcut-trt build` finds it.  out: where the drafter, its curve and all working files go.

    init: a DFlash drafter to continue from; block, layers and attention are its own then.
    data: .npz files; tokens: response tokens to let the target write besides, into out/data.
    seen: .npz files that init was trained on, of which nothing is held out.
    draft_vocab: most frequent response ids that drafts are made of; None: init's own, or all without init; 0: all.
    steps, minutes: the training ends with the first that is reached.  sequences, anchors: of one step.
    held_out: fraction of the sequences of data that is never trained on.
    """

    target: str
    out: Path
    init: str | None = None
    data: tuple[Path, ...] = ()
    seen: tuple[Path, ...] = ()
    tokens: int = 0
    block: int | None = None
    layers: int | None = None
    attention: Literal["causal", "bidirectional"] | None = None
    draft_vocab: int | None = None
    steps: int | None = None
    minutes: float | None = None
    learning_rate: float = 8e-4
    gamma: float | None = None
    sequences: int = 8
    anchors: int = 32
    max_len: int = 512
    held_out: float = 0.03
    evaluate_every: int = 100
    precision: Literal["fp32", "bf16"] = "bf16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    seed: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidOption naming option, value and limit."""
        if self.block is not None and self.block not in BLOCK_SIZES:
            raise InvalidOption("--block", self.block, " or ".join(map(str, BLOCK_SIZES)))
        if not (self.data or self.tokens):
            raise InvalidOption("--data", "(none)", "a file, or --tokens N to let the target write N tokens")
        if self.steps is None and self.minutes is None:
            raise InvalidOption("--steps", "(none)", "or --minutes is needed, to know when to end")
        if self.seen and self.init is None:
            raise InvalidOption("--seen", self.seen[0], "only with --init")
        for name in ("block", "layers", "attention"):
            if self.init is not None and getattr(self, name) is not None:
                raise InvalidOption(f"--{name}", getattr(self, name), "only without --init, whose own is kept")
        for name, least in (("layers", 1), ("steps", 1), ("threads", 1), ("draft_vocab", 0), ("tokens", 0)):
            _at_least(name, getattr(self, name), least)
        for name, least in (("sequences", 1), ("anchors", 1), ("max_len", 16), ("evaluate_every", 1), ("seed", 0)):
            _at_least(name, getattr(self, name), least)
        for name in ("minutes", "learning_rate", "gamma"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidOption(_flag(name), value, "more than 0")
        if not 0 < self.held_out < 1:
            raise InvalidOption("--held-out", self.held_out, "more than 0 and less than 1")


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise InvalidOption(_flag(name), value, f"at least {least}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
