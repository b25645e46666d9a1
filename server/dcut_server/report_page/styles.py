"""How each policy is drawn: the same everywhere on a page, and told apart without colour as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Style:
    """colour: a custom property of the page's style sheet.  dash: as in SVG, "" is solid."""

    colour: str
    dash: str = ""
    strong: bool = False


KNOWN = {
    "plain": Style("grey", "5 3"),
    "oracle": Style("ink", "1.5 3"),
    "oracle-budget": Style("ink", "7 3 1.5 3"),
    "auto": Style("red", strong=True),
    "dcut": Style("blue"),
    "dflash": Style("orange"),
}
COLOURS = ("teal", "violet", "olive", "pink", "brown", "cyan")
DASHES = ("", "6 3", "2 2.5", "9 3 2 3", "4 2 1 2")


def styles(policies: Sequence[str]) -> dict[str, Style]:
    """By name. Policies of one kind, such as ratio:0.25 and ratio:0.5, share a colour and differ in their dashes."""
    found = {name: KNOWN[name] for name in policies if name in KNOWN}
    used = {(style.colour, style.dash) for style in found.values()}
    unknown = dict.fromkeys(_kind(name) for name in policies if _kind(name) not in KNOWN)
    colours = {kind: COLOURS[place % len(COLOURS)] for place, kind in enumerate(unknown)}
    for name in dict.fromkeys(policies):
        if name not in found:
            kind = _kind(name)
            colour = KNOWN[kind].colour if kind in KNOWN else colours[kind]
            dash = next((dash for dash in DASHES if (colour, dash) not in used), "")
            used.add((colour, dash))
            found[name] = Style(colour, dash)
    return found


def _kind(policy: str) -> str:
    return policy.partition(":")[0]
