"""What a build is asked for, checked before any work is done."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dcut_engines.model_config import DecoderConfig
from dcut_trt.errors import DcutError

Backend = Literal["openvino", "onnx", "tensorrt", "tensorrt-rtx"]
Precision = Literal["fp32", "fp16", "bf16"]
# "own": the drafter's draft_vocab.json where it has one; "all": every row of the head; N: the first N ids; or a file.
DraftVocab = int | Path | Literal["own", "all"]

MAX_BATCH = 256
MAX_RATIOS = 16
MAX_PREFILL_CHUNK = 8192
DEFAULT_PREFILL_CHUNK = 256
PLAN_BACKENDS = ("tensorrt", "tensorrt-rtx")
# TensorRT has no fused attention kernel for fp32.
PRECISIONS: dict[str, tuple[Precision, ...]] = {
    "openvino": ("fp32", "bf16"),
    "onnx": ("fp32", "fp16", "bf16"),
    **dict.fromkeys(PLAN_BACKENDS, ("fp16", "bf16")),
}
PLAN_OPTIONS = ("compute_capability", "prefill_chunk", "workspace_mib")


class InvalidOption(DcutError):
    """A build option is out of range. The message names option, value and limit."""

    def __init__(self, option: str, value: object, limit: str) -> None:
        super().__init__(f"{option} {value}: {limit}")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """target, drafter: as sources resolves them.  out: the bundle's directory.  max_len: positions per request.

    ratios: fractions of B * (D + 1) to lay engines out for, in (0, 1].
    Of the TensorRT backends only: compute_capability of the GPU to compile for (None: the local one), prefill_chunk,
    the longest prefill in rows (None: DEFAULT_PREFILL_CHUNK), and workspace_mib, the most scratch memory a layer may
    take (None: TensorRT's own limit).
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
    compute_capability: str | None = None
    prefill_chunk: int | None = None
    workspace_mib: int | None = None

    def __post_init__(self) -> None:
        """Raise InvalidOption for a value that no model could be built with."""
        if self.backend not in PRECISIONS:
            raise InvalidOption("--backend", self.backend, " or ".join(PRECISIONS))
        if self.precision not in PRECISIONS[self.backend]:
            supported = " or ".join(PRECISIONS[self.backend])
            raise InvalidOption("--precision", self.precision, f"{supported} with --backend {self.backend}")
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
        _check_plan_options(self)

    @property
    def makes_plans(self) -> bool:
        return self.backend in PLAN_BACKENDS

    @property
    def longest_prefill(self) -> int:
        """Rows; a prompt is never longer than max_len."""
        return min(self.prefill_chunk or DEFAULT_PREFILL_CHUNK, self.max_len)


def _check_plan_options(options: BuildOptions) -> None:
    for name in PLAN_OPTIONS:
        if getattr(options, name) is not None and not options.makes_plans:
            flag, others = f"--{name.replace('_', '-')}", " or ".join(PLAN_BACKENDS)
            raise InvalidOption(flag, getattr(options, name), f"only with --backend {others}, not {options.backend}")
    capability = options.compute_capability
    if capability is not None and re.fullmatch(r"[1-9]\d?\.\d", capability) is None:
        raise InvalidOption("--compute-capability", capability, "MAJOR.MINOR, such as 8.9")
    if options.prefill_chunk is not None and not 1 <= options.prefill_chunk <= MAX_PREFILL_CHUNK:
        raise InvalidOption("--prefill-chunk", options.prefill_chunk, f"from 1 to {MAX_PREFILL_CHUNK}")
    if options.workspace_mib is not None and options.workspace_mib < 1:
        raise InvalidOption("--workspace-mib", options.workspace_mib, "at least 1")


def check_against_target(options: BuildOptions, target: DecoderConfig, block_size: int) -> None:
    """Raise InvalidOption for a value that this target, with blocks of block_size = D + 1, cannot serve."""
    if options.max_len > target.max_position:
        raise InvalidOption("--max-len", options.max_len, f"the model's context is {target.max_position}")
    if options.max_len < block_size:
        raise InvalidOption("--max-len", options.max_len, f"at least one block of {block_size}")
    if isinstance(options.draft_vocab, int) and options.draft_vocab > target.vocab_size:
        raise InvalidOption("--draft-vocab", options.draft_vocab, f"the vocabulary has {target.vocab_size} ids")
