"""Which shapes the plans are compiled for, and our own check of them: TensorRT takes min > opt and unknown names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcut_trt.errors import DcutError
from dcut_trt.manifest import ProfileSpec
from dcut_trt.spec.packing import budget, captured_batches

Range = tuple[int, int, int]  # min, opt, max
Shape = tuple[int, ...]

LARGEST = 2**31 - 1  # TensorRT indexes dimensions with int32
# A profile of one row alone makes TensorRT multiply vectors, for which it stores every weight again in another layout:
# 496 MB instead of 276 for SmolLM2. Such a profile takes a second row, which may be padding.
FEWEST_ROWS = 2
BOUND_DIMENSIONS = {"B_plus_1": "B"}  # one more than that dimension


class PlanError(DcutError):
    """A graph or profile that no plan can be compiled from. The message names tensor or dimension, value and limit."""


@dataclass(frozen=True, slots=True)
class GraphInput:
    """An input of an ONNX graph. kind: "i32", "fp16" and so on.  dims: a name where the dimension is dynamic."""

    name: str
    kind: str
    dims: tuple[int | str, ...]

    def shapes(self, profile: ProfileSpec) -> tuple[Shape, Shape, Shape]:
        """This input's min, opt and max shape under a profile that check_profile has passed."""
        ranges = [(dim,) * 3 if isinstance(dim, int) else profile.dims[dim] for dim in self.dims]
        minimum, optimum, maximum = (tuple(range_[place] for range_ in ranges) for place in range(3))
        return minimum, optimum, maximum


@dataclass(frozen=True, slots=True)
class Layout:
    """What the profiles follow from. block_size: D + 1.  prefill_chunk: rows of the longest prefill."""

    ratios: tuple[float, ...]
    max_batch: int
    block_size: int
    prefill_chunk: int

    @property
    def batches(self) -> tuple[int, ...]:
        return captured_batches(self.max_batch)

    @property
    def draft_window(self) -> int:
        """A step leaves at most D + 1 new context rows per request, and its block follows them."""
        return 2 * self.block_size


def cache_slots(max_len: int, block_size: int) -> int:
    """S_max: a window may start at the last position of a request, and the drafter's is two blocks long.

    Rounded up to a multiple of 8, so that every request's row of the cache starts at a multiple of 256 bytes.
    """
    return -(-(max_len + 2 * block_size) // 8) * 8


def target_profiles(layout: Layout) -> tuple[ProfileSpec, ...]:
    """Verification of exactly K rows for every token bucket, plain decoding, prefill.

    Rows of a bucket are exact, the batch is not: a bucket serves any B <= K requests. Prefill takes one request per
    call, because its window is a rectangle, and the shorter prompts beside a long one would be padding.
    """
    widest: dict[int, int] = {}  # the largest captured batch that has this bucket
    for batch in layout.batches:
        for ratio in layout.ratios:
            rows = budget(ratio, batch, layout.block_size)
            widest[rows] = max(batch, widest.get(rows, 0))
    verify = (
        _target_profile(
            "verify",
            f"verify-{rows}",
            rows=_exactly(rows),
            batch=(1, widest[rows], min(rows, layout.max_batch)),
            window=(layout.block_size,) * 3,
        )
        for rows in sorted(widest)
    )
    every_batch = (1, layout.max_batch, layout.max_batch)
    one_each = _up_to(layout.max_batch)
    decode = _target_profile("decode", "decode", rows=one_each, batch=every_batch, window=(1, 1, 1))
    chunk = _up_to(layout.prefill_chunk)
    prefill = _target_profile("prefill", "prefill", rows=chunk, batch=(1, 1, 1), window=chunk)
    # Only the last row of a prompt has a next token that anyone wants.
    return (*verify, decode, _with(prefill, H=_up_to(1), S=(0, 1, 1)))


def drafter_profiles(layout: Layout) -> tuple[ProfileSpec, ...]:
    """Drafting for every captured B, and from the batch below it; and one request's prompt, chunk by chunk."""
    draft = []
    smaller = 0
    for batch in layout.batches:
        contexts = (1, batch * layout.block_size, batch * layout.block_size)
        window = (layout.draft_window,) * 3
        draft.append(_drafter_profile("draft", f"draft-{batch}", (smaller + 1, batch, batch), contexts, window))
        smaller = batch
    chunk = _up_to(layout.prefill_chunk)
    return (*draft, _drafter_profile("prefill", "prefill", (1, 1, 1), chunk, _shift(chunk, layout.block_size)))


def check_profile(profile: ProfileSpec, inputs: Sequence[GraphInput]) -> None:
    """Raise PlanError unless the profile has a possible range for each dynamic dimension of the graph, and no other."""
    used = {dim: graph_input.name for graph_input in inputs for dim in graph_input.dims if isinstance(dim, str)}
    for dim, name in used.items():
        if dim not in profile.dims:
            raise PlanError(f"profile {profile.name}: dimension {dim} of input {name} has no range")
    for dim, (minimum, optimum, maximum) in profile.dims.items():
        shown = f"profile {profile.name}: dimension {dim} = [{minimum}, {optimum}, {maximum}]"
        if dim not in used:
            raise PlanError(f"{shown}: no input has it; the graph's are {', '.join(sorted(used))}")
        if not 0 <= minimum <= optimum <= maximum:
            raise PlanError(f"{shown}: 0 <= min <= opt <= max must hold")
        if maximum > LARGEST:
            raise PlanError(f"{shown}: the largest dimension is {LARGEST}")
    for dim, base in BOUND_DIMENSIONS.items():
        if dim in used and profile.dims[dim] != _shift(profile.dims[base], 1):
            raise PlanError(
                f"profile {profile.name}: dimension {dim} = {list(profile.dims[dim])} contradicts "
                f"{base} = {list(profile.dims[base])}: it must be one more"
            )


def _target_profile(kind: str, name: str, *, rows: Range, batch: Range, window: Range) -> ProfileSpec:
    # Sampled requests need the logits of their rows; when all are greedy, none leave the graph.
    logits = (0, rows[1], rows[2])
    dims = {"K": rows, "B": batch, "B_plus_1": _shift(batch, 1), "W": window, "H": rows, "S": logits}
    return ProfileSpec(name, kind, dims)


def _drafter_profile(kind: str, name: str, batch: Range, contexts: Range, window: Range) -> ProfileSpec:
    return ProfileSpec(name, kind, {"C": contexts, "B": batch, "B_plus_1": _shift(batch, 1), "W": window})


def _with(profile: ProfileSpec, **dims: Range) -> ProfileSpec:
    merged: Mapping[str, Range] = {**profile.dims, **dims}
    return ProfileSpec(profile.name, profile.kind, dict(merged))


def _exactly(rows: int) -> Range:
    return (rows,) * 3 if rows >= FEWEST_ROWS else _up_to(rows)


def _up_to(rows: int) -> Range:
    largest = max(rows, FEWEST_ROWS)
    return 1, largest, largest


def _shift(values: Range, by: int) -> Range:
    minimum, optimum, maximum = values
    return minimum + by, optimum + by, maximum + by
