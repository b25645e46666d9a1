"""What became of the drafts, and how well that was foreseen, as it stands on the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcut_server.bench.confidence import Reliability
from dcut_server.bench.summary import DFLASH
from dcut_server.report_page.charts import Bar, Chart, depth_bars, reliability_chart
from dcut_server.report_page.documents import Cell, Confidence
from dcut_server.report_page.styles import Style

BEFORE, AFTER = Style("grey", "5 3"), Style("red", strong=True)
BARS_WIDTH, BARS_HEIGHT = 180.0, 96.0


@dataclass(frozen=True, slots=True)
class DepthView:
    policy: str
    bars: tuple[Bar, ...]
    said: str


@dataclass(frozen=True, slots=True)
class DraftsView:
    """legend: of the reliability diagrams."""

    diagrams: tuple[Chart, ...]
    legend: tuple[tuple[str, Style], ...]
    depths: tuple[DepthView, ...]


def drafts_view(cells: Sequence[Cell], policies: Sequence[str]) -> DraftsView | None:
    """None when no cell says anything of its drafts."""
    found = {
        policy: [cell.confidence for cell in cells if cell.policy == policy and cell.confidence] for policy in policies
    }
    found = {policy: parts for policy, parts in found.items() if parts}
    if not found:
        return None
    diagrams = _diagrams(found)
    names = dict.fromkeys(line.name for diagram in diagrams for line in diagram.lines)
    return DraftsView(
        diagrams,
        tuple((name, BEFORE if name == "prefix product" else AFTER) for name in names),
        tuple(_depth_view(policy, _totals(parts)) for policy, parts in found.items()),
    )


def recalibrates(confidence: Confidence) -> bool:
    """Whether the policy's score is another than the prefix product, beyond what rounding moves between bins."""
    before, after = confidence.before, confidence.after
    if before is None or after is None:
        return False
    moved = sum(abs(old - new) for old, new in zip(before.count, after.count, strict=False))
    return moved > 0.01 * sum(before.count)


def merged(parts: Sequence[Reliability]) -> Reliability:
    """Of all positions together. There is no AUROC of it: bins do not keep the order within them."""
    bins = range(len(parts[0].count))
    count = tuple(sum(part.count[at] for part in parts) for at in bins)

    def mean(values: Sequence[tuple[float | None, ...]], at: int) -> float | None:
        total = sum((held[at] or 0.0) * part.count[at] for held, part in zip(values, parts, strict=True))
        return total / count[at] if count[at] else None

    predicted = tuple(mean([part.predicted for part in parts], at) for at in bins)
    accepted = tuple(mean([part.accepted for part in parts], at) for at in bins)
    gaps = sum(abs((predicted[at] or 0.0) - (accepted[at] or 0.0)) * count[at] for at in bins)
    return Reliability(predicted, accepted, count, gaps / max(1, sum(count)), None)


def _diagrams(found: dict[str, list[Confidence]]) -> tuple[Chart, ...]:
    """One for each policy that makes something else of the prefix product; else one of the drafter alone."""
    changed = [policy for policy, parts in found.items() if any(recalibrates(part) for part in parts)]
    alone = [DFLASH] if DFLASH in found else list(found)[:1]
    diagrams = []
    for policy in changed or alone:
        before = _alike([part.before for part in found[policy]])
        after = _alike([part.after for part in found[policy]]) if changed else []
        curves = [
            (name, style, merged(parts))
            for name, style, parts in (("prefix product", BEFORE, before), ("the policy's score", AFTER, after))
            if parts
        ]
        if curves:
            said = "; ".join(f"ECE of {name} {curve.ece:.3f}" for name, _, curve in curves)
            diagrams.append(reliability_chart(f"{policy}: {said}", curves))
    return tuple(diagrams)


def _alike(parts: Sequence[Reliability | None]) -> list[Reliability]:
    """Those that have positions, in bins as many as the first one's."""
    filled = [part for part in parts if part is not None and any(part.count)]
    return [part for part in filled if len(part.count) == len(filled[0].count)]


def _totals(parts: Sequence[Confidence]) -> Confidence:
    longest = max(len(part.drafted) for part in parts)

    def total(values: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(sum(held[at] for held in values if at < len(held)) for at in range(longest))

    drafted, kept, accepted = (
        total([getattr(part, name) for part in parts]) for name in ("drafted", "kept", "accepted")
    )
    return Confidence(drafted, kept, accepted, None, None)


def _depth_view(policy: str, totals: Confidence) -> DepthView:
    drafted, kept, accepted = (sum(values) for values in (totals.drafted, totals.kept, totals.accepted))
    said = f"{kept / max(1, drafted):.0%} of drafts kept, {accepted / max(1, kept):.0%} of those accepted"
    return DepthView(policy, depth_bars(totals, BARS_WIDTH, BARS_HEIGHT), said)
