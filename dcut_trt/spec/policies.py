"""The rules by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dcut_trt.errors import UnsupportedOption
from dcut_trt.spec.auto import PART_NAMES, make_auto, names_parts
from dcut_trt.spec.baselines import DCutVllm, DSpark, SmartSpec, Tetris, Threshold, ToDepth
from dcut_trt.spec.cost_table import CostTable
from dcut_trt.spec.policy import Policy
from dcut_trt.spec.rules import DCut, FixedDepth, FixedRatio, Plain
from dcut_trt.stage_types import DraftTraits


@dataclass(frozen=True, slots=True)
class _Kind:
    """make: from the text after the colon, the cost table and what the networks allow.  takes: what that text must be,
    "" where there is none.  bare: it may be left out, too.
    """

    make: Callable[[str, CostTable | None, DraftTraits], Policy]
    takes: str = ""
    accepts: Callable[[str], bool] = lambda text: not text
    needs_table: bool = False
    bare: bool = False


def _share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def _inner_share(text: str) -> bool:
    return _share(text) and float(text) < 1


def _count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) >= 1


_KINDS: dict[str, _Kind] = {
    "plain": _Kind(lambda text, table, traits: Plain()),
    "dflash": _Kind(lambda text, table, traits: FixedDepth()),
    "ratio": _Kind(lambda text, table, traits: FixedRatio(float(text)), "R (0 < R <= 1)", _share),
    "dcut": _Kind(lambda text, table, traits: DCut(_given(table)), needs_table=True),
    "dcut-vllm": _Kind(lambda text, table, traits: DCutVllm(_given(table)), needs_table=True),
    "tetris": _Kind(lambda text, table, traits: Tetris(int(text), traits), "C (C >= 1)", _count),
    "dspark": _Kind(lambda text, table, traits: DSpark(_given(table)), needs_table=True),
    "smartspec": _Kind(lambda text, table, traits: SmartSpec(_given(table), traits), needs_table=True),
    "threshold": _Kind(lambda text, table, traits: Threshold(float(text)), "T (0 < T < 1)", _inner_share),
    "depth": _Kind(lambda text, table, traits: ToDepth(int(text), traits), "N (N >= 1)", _count),
    "auto": _Kind(make_auto, f"-PART-... (without {', '.join(PART_NAMES)})", names_parts, bare=True),
}

POLICY_NAMES = ", ".join(
    f"{name}, " * kind.bare + f"{name}:{kind.takes}" if kind.takes else name for name, kind in _KINDS.items()
)


_UNKNOWN = DraftTraits(0)  # whole blocks in buckets, as any networks run


def check_policy_name(name: str) -> None:
    """Raises UnsupportedOption naming what is offered, before any engine is loaded."""
    kind, colon, text = name.partition(":")
    if kind not in _KINDS or not _KINDS[kind].accepts(text) or (colon and not text):
        raise UnsupportedOption(f"policy={name!r}: must be one of {POLICY_NAMES}")


def make_policy(name: str, table: CostTable | None, traits: DraftTraits = _UNKNOWN) -> Policy:
    """The policy of this name, for networks of these traits.

    Raises UnsupportedOption for an unknown name, and for a rule that reads costs when there is no cost table.
    """
    check_policy_name(name)
    kind, _, text = name.partition(":")
    if _KINDS[kind].needs_table and table is None:
        raise UnsupportedOption(f"policy={name!r}: needs a cost table, and none was measured or loaded")
    return _KINDS[kind].make(text, table, traits)


def _given(table: CostTable | None) -> CostTable:
    assert table is not None, "make_policy() has looked"
    return table
