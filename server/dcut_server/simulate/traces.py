"""Drafts with their fate at every position of recorded or generated texts, and the file that holds them."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcut_trt.errors import DcutError
from dcut_trt.types import FloatArray, IntArray

FORMAT = "dcut-trt trace"
VERSION = 1

# Shipped: SmolLM2-135M-Instruct with its DFlash drafter, blocks of 8.
RECORDED = ("smollm2-gsm8k", "smollm2-humaneval", "smollm2-mt-bench")
_FOLDER = Path(__file__).parent / "recorded"

# Name in the file -> dtype and number of dimensions; margin may be left out, and so may the words.
_FIELDS: dict[str, tuple[type, int]] = {
    "starts": (np.int64, 1),
    "prompt_lens": (np.int32, 1),
    "temperatures": (np.float32, 1),
    "confidence": (np.float32, 2),
    "accepted": (np.int32, 1),
    "judged": (np.int32, 1),
}
_WORDS = ("tokens", "last_tokens")


class TraceError(DcutError):
    """A trace file is missing, of another format, or malformed. The message names file, field and place."""


@dataclass(frozen=True)
class Trace:
    """What the drafter would propose after each token of R texts, N positions in all.

    Position n of request r is starts[r] + n: a block drafted when n + 1 tokens of the answer are committed; the answer
    has one token more than the request has positions, since nothing is drafted after the last.

    name: of the prompts.  source: what was recorded.  starts: [R + 1], ascending.  prompt_lens, temperatures: [R].
    confidence: [N, D] in [0, 1].  margin: [N, D] or None, as in Draft.
    accepted: [N] leading drafts that are the answer's own next tokens.
    judged: [N] leading drafts of which that is known: one more than accepted after a wrong one, fewer at the end.
    tokens: [N, D] the drafts.  last_tokens: [N, 2] as in BatchView.  Both None in a trace without words.
    """

    name: str
    source: str
    starts: NDArray[np.int64]
    prompt_lens: IntArray
    temperatures: FloatArray
    confidence: FloatArray
    accepted: IntArray
    judged: IntArray
    margin: FloatArray | None = None
    tokens: IntArray | None = None
    last_tokens: IntArray | None = None

    @property
    def requests(self) -> int:
        return len(self.prompt_lens)

    @property
    def draft_length(self) -> int:
        return int(self.confidence.shape[1])


def check_trace(trace: Trace) -> None:
    """Raises TraceError naming the field, the first place in it that is wrong, and what belongs there."""
    positions, length = trace.confidence.shape
    requests = len(trace.starts) - 1
    for name in ("prompt_lens", "temperatures"):
        _require(
            len(getattr(trace, name)) == requests, f"{name}: has {len(getattr(trace, name))} of {requests} requests"
        )
    for name in ("accepted", "judged"):
        _require(len(getattr(trace, name)) == positions, f"{name}: has {len(getattr(trace, name))} of {positions} rows")
    _require(requests > 0 and positions > 0 and length > 0, "starts, confidence: hold no block")
    _require(trace.starts[0] == 0, f"starts[0]={trace.starts[0]}: must be 0")
    _require(
        trace.starts[-1] == positions,
        f"starts[{requests}]={trace.starts[-1]}: must be {positions}, the rows of confidence",
    )
    _everywhere("starts", np.diff(trace.starts) > 0, "the next one must be larger")
    _everywhere("prompt_lens", trace.prompt_lens > 0, "must be at least 1")
    _everywhere("temperatures", np.isfinite(trace.temperatures) & (trace.temperatures >= 0), "must be at least 0")
    _everywhere("confidence", (trace.confidence >= 0) & (trace.confidence <= 1), "must be in [0, 1]")
    if trace.margin is not None:
        _require(
            trace.margin.shape == trace.confidence.shape, f"margin: is {trace.margin.shape}, must be as confidence"
        )
        _everywhere("margin", (trace.margin >= 0) & (trace.margin <= 1), "must be in [0, 1]")
    _require((trace.tokens is None) == (trace.last_tokens is None), "tokens, last_tokens: one of them is missing")
    for name, shape in zip(_WORDS, ((positions, length), (positions, 2)), strict=True):
        words = getattr(trace, name)
        if words is not None:
            _require(words.shape == shape, f"{name}: is {words.shape}, must be {shape}")
            _everywhere(name, words >= 0, "must be at least 0")
    left = np.repeat(trace.starts[1:], np.diff(trace.starts)) - np.arange(positions)
    _everywhere(
        "accepted", (trace.accepted >= 0) & (trace.accepted <= np.minimum(left, length)), "must be 0 to what follows"
    )
    after = np.where(trace.accepted < np.minimum(left, length), trace.accepted + 1, trace.accepted)
    _everywhere("judged", trace.judged == after, "must be one more than accepted, or accepted at the end")


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace as a compressed npz. Raises TraceError when it is malformed or cannot be written."""
    check_trace(trace)
    facts = {"format": FORMAT, "version": VERSION, "name": trace.name, "source": trace.source}
    arrays = {name: np.array(value) for name, value in facts.items()}
    arrays |= {name: getattr(trace, name) for name in _FIELDS}
    arrays |= {name: getattr(trace, name) for name in ("margin", *_WORDS) if getattr(trace, name) is not None}
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


def load_recorded(name: str) -> Trace:
    """A shipped trace."""
    return load_trace(_FOLDER / f"{name}.npz")


def load_trace(path: Path) -> Trace:
    """Read a trace. Raises TraceError naming file, field and place."""
    try:
        with np.load(path, allow_pickle=False) as file:
            raw = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, TypeError, EOFError) as error:
        raise TraceError(f"{path}: not a trace: {error}") from error
    try:
        trace = _parsed(raw)
        check_trace(trace)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    return trace


def _parsed(raw: dict[str, NDArray[Any]]) -> Trace:
    for name in ("format", "version", "name", "source", *_FIELDS):
        _require(name in raw, f"{name}: is missing")
    _require(raw["format"].shape == () and str(raw["format"]) == FORMAT, f"format: must be {FORMAT!r}")
    _require(raw["version"].shape == () and raw["version"] == VERSION, f"version={raw['version']}: must be {VERSION}")
    arrays = {name: _array(name, raw[name], dtype, dimensions) for name, (dtype, dimensions) in _FIELDS.items()}
    margin = _array("margin", raw["margin"], np.float32, 2) if "margin" in raw else None
    arrays |= {name: _array(name, raw[name], np.int32, 2) for name in _WORDS if name in raw}
    return Trace(name=str(raw["name"]), source=str(raw["source"]), **arrays, margin=margin)


def _array(name: str, values: NDArray[Any], dtype: type, dimensions: int) -> NDArray[Any]:
    wanted = "f" if np.issubdtype(dtype, np.floating) else "i"
    _require(
        values.ndim == dimensions and values.dtype.kind == wanted,
        f"{name}: is {values.dtype} of {values.ndim} dimensions, must be {np.dtype(dtype)} of {dimensions}",
    )
    return values.astype(dtype)


def _everywhere(name: str, right: NDArray[np.bool_], limit: str) -> None:
    if not right.all():
        place = ", ".join(str(index) for index in np.argwhere(~right)[0])
        raise TraceError(f"{name}[{place}]: {limit}")


def _require(right: bool | np.bool_, message: str) -> None:
    if not right:
        raise TraceError(message)
