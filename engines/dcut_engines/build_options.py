"""What a build is asked for, checked before any work is done."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dcut_engines.model_config import DecoderConfig, Precision
from dcut_trt.errors import DcutError

Backend = Literal["openvino", "onnx"]
# "own": the drafter's draft_vocab.json where it has one; "all": every row of the head; N: the first N ids; or a file.
DraftVocab = int | Path | Literal["own", "all"]

MAX_BATCH = 256
MAX_RATIOS = 16


class InvalidOption(DcutError):
    """A build option is out of range. The message names option, value and limit."""

    def __init__(self, option: str, value: object, limit: str) -> None:
        super().__init__(f"{option} {value}: {limit}")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """target, drafter: as sources resolves them.  out: the bundle's directory.  max_len: positions per request.

    ratios: fractions of B * (D + 1) to lay engines out for, in (0, 1].
    """

    target: str
    drafter: str
    out: Path
    backend: Backend = "openvino"
    precision: Precision = "fp32"
    max_batch: int = 32
    max_len: int = 2048
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    draft_vocab: DraftVocab = "own"

    def __post_init__(self) -> None:
        """Raise InvalidOption for a value that no model could be built with."""
        if self.backend not in ("openvino", "onnx"):
            raise InvalidOption("--backend", self.backend, "openvino or onnx")
        if self.precision not in ("fp32", "bf16"):
            raise InvalidOption("--precision", self.precision, "fp32 or bf16")
        if not 1 <= self.max_batch <= MAX_BATCH:
            raise InvalidOption("--max-batch", self.max_batch, f"from 1 to {MAX_BATCH}")
        if self.max_len < 1:
            raise InvalidOption("--max-len", self.max_len, "at least 1")
        shown = ",".join(f"{ratio:g}" for ratio in self.ratios)
        if not 1 <= len(self.ratios) <= MAX_RATIOS:
            raise InvalidOption("--ratios", shown or "(none)", f"from 1 to {MAX_RATIOS} values")
        for ratio in self.ratios:
            if not (math.isfinite(ratio) and 0 < ratio <= 1):
                raise InvalidOption("--ratios", shown, f"{ratio:g} is not in (0, 1]")
        if len(set(self.ratios)) != len(self.ratios):
            raise InvalidOption("--ratios", shown, "a value is there twice")
        if isinstance(self.draft_vocab, int) and self.draft_vocab < 1:
            raise InvalidOption("--draft-vocab", self.draft_vocab, "at least 1 id")


def check_against_target(options: BuildOptions, target: DecoderConfig, block_size: int) -> None:
    """Raise InvalidOption for a value that this target, with blocks of block_size = D + 1, cannot serve."""
    if options.max_len > target.max_position:
        raise InvalidOption("--max-len", options.max_len, f"the model's context is {target.max_position}")
    if options.max_len < block_size:
        raise InvalidOption("--max-len", options.max_len, f"at least one block of {block_size}")
    if isinstance(options.draft_vocab, int) and options.draft_vocab > target.vocab_size:
        raise InvalidOption("--draft-vocab", options.draft_vocab, f"the vocabulary has {target.vocab_size} ids")
