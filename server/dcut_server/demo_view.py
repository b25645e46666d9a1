"""What the demo shows while streams run: one line a second, and a few answers as they grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from dcut_trt.types import Usage

LINES, ANSWER_LINES, TITLE_LENGTH = 10, 4, 90


@dataclass(slots=True)
class Answer:
    """One stream. shown: how much of its text a log has seen."""

    question: str
    text: str = ""
    shown: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """Totals of the server at a moment. seconds: since the streams began.  running: live requests."""

    seconds: float
    running: int
    steps: int
    drafted: int
    verified: int
    accepted: int
    output_tokens: int


def reading_line(before: Reading, now: Reading) -> str:
    """What happened between two readings."""
    seconds = max(now.seconds - before.seconds, 1e-9)
    drafted, verified = now.drafted - before.drafted, now.verified - before.verified
    accepted, tokens = now.accepted - before.accepted, now.output_tokens - before.output_tokens
    kept = f"{verified / drafted:.0%}" if drafted else "-"
    return (
        f"{now.seconds:4.1f} s | {now.running} live | {tokens / seconds:6.1f} tokens/s | {now.steps - before.steps} "
        f"steps | drafted {drafted}, kept {verified} ({kept}), accepted {accepted}"
    )


class DemoView:
    """A live picture on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._answers: dict[int, Answer] = {}
        self._lines: list[str] = []
        self._live: Live | None = None

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Inside, tick() shows what there is."""
        if not self.console.is_terminal:
            yield
            for place in self._answers:
                self._say_fresh(place)
            return
        with Live(console=self.console, refresh_per_second=10, get_renderable=self._picture) as self._live:
            yield
        self._live = None

    def watch(self, place: int, answer: Answer) -> None:
        """Show this answer from now on, in place of the one before."""
        if self._live is None:
            self._say_fresh(place)
            self.say(f"         question {place + 1}: {_short(answer.question)}")
        self._answers[place] = answer

    def tick(self, line: str) -> None:
        """A second has passed."""
        self._lines.append(line)
        if self._live is not None:
            return
        self.say(line)
        for place in self._answers:
            self._say_fresh(place)

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _say_fresh(self, place: int) -> None:
        answer = self._answers.get(place)
        if answer is not None and (fresh := " ".join(answer.text[answer.shown :].split())):
            self.say(f"         answer {place + 1}: {fresh}")
            answer.shown = len(answer.text)

    def _picture(self) -> Group:
        panels = [
            Panel(Text(_tail(answer.text, self.console.width - 4)), title=Text(_short(answer.question)))
            for answer in self._answers.values()
        ]
        return Group(*(Text(line) for line in self._lines[-LINES:]), *panels)


def usage_sum(usages: Sequence[Usage]) -> str:
    """One line for all finished requests, from what each stream was told about itself."""
    tokens, steps = sum(usage.output_tokens for usage in usages), sum(usage.steps for usage in usages)
    drafted, verified = sum(usage.drafted for usage in usages), sum(usage.verified for usage in usages)
    accepted = sum(usage.accepted for usage in usages)
    kept = f"{verified / drafted:.0%}" if drafted else "none"
    return (
        f"{len(usages)} requests: {tokens} tokens in {steps} steps, {tokens / max(steps, 1):.2f} per step; "
        f"of {drafted} drafted tokens {kept} were verified and {accepted} accepted"
    )


def _tail(text: str, width: int) -> str:
    """The last lines of a text as a panel of this width wraps it."""
    rows = [line[start : start + width] for line in text.splitlines() for start in range(0, max(len(line), 1), width)]
    return "\n".join(rows[-ANSWER_LINES:])


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= TITLE_LENGTH else flat[: TITLE_LENGTH - 3] + "..."
