"""Whether to draft at all, and how far: changing one's mind only for a gain, and looking again now and then."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from dcut_trt.spec.load import Kind, Load

BYPASS = 0  # the arm that drafts nothing; every other arm is a draft depth
PROBE = -1  # a step in which a few draft, to see whether all should

_COMPARE_EVERY = 16  # steps between two comparisons of the arms at one batch size
_BYPASSED_EVERY = 64  # as long as nobody drafts, and so nothing new is known of drafts
_MARGIN = 0.02  # predicted gain below which no arm is left
_DOUBT = 0.03  # the same for not drafting: what drafting brings is expected, what plain decoding brings is sure
_CLEAR = 0.15  # predicted gain at which it is left at once
_PATIENCE = 3  # comparisons that a smaller gain must stand, after as many in which none was needed
_CLOSE, _CLOSE_AT_FIRST = 0.15, 0.4  # predicted loss up to which plain decoding is tried against drafting
_CLOSE_TO_PLAIN = 0.05  # and the other way round, where a trial has the drafter take up all features that wait
_TRIAL = 6  # steps of a trial
_SOON, _LATE = 64, 256  # steps of drafting between two trials without: doubled each time
_WHOLE_EVERY = 64  # steps of short blocks after which one is drafted whole, to see what lies deeper


class ArmChoice:
    """The arm in use, None before the first comparison. Noise does not move it: a lead must be clear, or last."""

    def __init__(self) -> None:
        self.current: int | None = None
        self._leads = self._comparisons = 0

    def weigh(self, rates: Mapping[int, float]) -> None:
        """Choose anew. rates: predicted tokens per millisecond of each arm."""
        best = max(rates, key=lambda arm: rates[arm])
        lead = math.inf if self.current is None else rates[best] / rates[self.current] - 1
        self._leads = self._leads + 1 if lead > (_DOUBT if self.current == BYPASS else _MARGIN) else 0
        self._comparisons += 1
        if lead > _CLEAR or self._leads >= (_PATIENCE if self._comparisons > _PATIENCE else 1):
            self.current, self._leads = best, 0


_SHORTEST, _LONGEST = 64, 512  # steps between two probes
_AGAIN = 4  # steps until the next probe when one spoke for drafting
_SHARE = 0.005  # of all time that probes may cost
_SAVED_MS = 50.0  # of that share at most, to be spent at once: hours without a probe must not pay for a minute of them


class ProbeSchedule:
    """When a policy that has stopped drafting drafts a little to see whether it still should not.

    Probes become rarer while they find nothing new, and stop for a while when they have cost more than their share.
    """

    def __init__(self) -> None:
        # By kind of load: one that returns has not become news.
        self._intervals = defaultdict[Kind, int](lambda: _SHORTEST)
        self._kind = Load(0).kind
        self._since = 0
        self._credit_ms = _SAVED_MS

    def due(self, load: Load) -> bool:
        """To be asked once per step without drafting."""
        self._kind = load.kind
        self._since += 1
        return self._since >= self._intervals[self._kind] and self._credit_ms >= 0

    def probed(self, extra_ms: float) -> None:
        """extra_ms: what the probe cost more than a step without."""
        self._since = 0
        self._credit_ms -= max(0.0, extra_ms)

    def answered(self, *, draft: bool) -> None:
        """draft: whether, after the latest probe, drafting looks better than not."""
        longer = min(_LONGEST, max(_SHORTEST, 2 * self._intervals[self._kind]))
        self._intervals[self._kind] = _AGAIN if draft else longer

    def passed(self, step_ms: float) -> None:
        self._credit_ms = min(_SAVED_MS, self._credit_ms + _SHARE * step_ms)


class Arms:
    """Which arm a step takes, for each kind of load.

    Of an arm that is not in use nobody learns what it costs by now. So where drafting and not drafting are close, the
    other one is tried for a few steps now and then.
    """

    def __init__(self, draft_length: int) -> None:
        self._length = draft_length
        # By kind of load, so that traffic that returns finds its arm.
        self._choices = defaultdict[Kind, ArmChoice](ArmChoice)
        self._rivals: dict[Kind, int] = {}  # the best other arm, of drafting and not, where it is close
        self._trial_every: dict[Kind, int] = {}  # of those that have been tried without drafting
        self._compared: dict[Load, int] = {}  # the step at which its arms were compared
        self._probes = ProbeSchedule()
        self._asked = self._news = False  # a probe, and a probe or a trial that has not been weighed yet
        self._trial = (BYPASS, 0)  # an arm on trial, and for how many more steps
        self._steps = self._since_trial = self._since_whole = 0

    def current(self, load: Load) -> int | None:
        return self._choices[load.kind].current

    def must_compare(self, load: Load) -> bool:
        """To be asked once per step."""
        self._steps += 1
        every = _BYPASSED_EVERY if self.current(load) == BYPASS else _COMPARE_EVERY
        return self._news or self._steps - self._compared.get(load, -every) >= every

    def compare(self, load: Load, rates: Mapping[int, float]) -> None:
        """rates: predicted tokens per millisecond of each arm under this load, one of BYPASS if it may be."""
        drafting = max((arm for arm in rates if arm != BYPASS), key=lambda arm: rates[arm])
        if self._asked:
            self._probes.answered(draft=rates[drafting] > rates.get(BYPASS, 0.0))
        self._asked = self._news = False
        choice, kind = self._choices[load.kind], load.kind
        choice.weigh(rates)
        self._compared[load] = self._steps
        self._rivals.pop(kind, None)
        own, rival = (BYPASS, drafting) if choice.current == BYPASS else (drafting, BYPASS)
        against_drafting = _CLOSE if kind in self._trial_every else _CLOSE_AT_FIRST
        close = against_drafting if rival == BYPASS else _CLOSE_TO_PLAIN
        if rival in rates and rates[rival] > (1 - close) * rates[own]:
            self._rivals[kind] = rival

    def next(self, load: Load) -> int:
        """BYPASS, PROBE or a draft depth."""
        arm, left = self._trial
        if left:
            self._trial = (arm, left - 1)
            return arm
        current, rival = self.current(load), self._rivals.get(load.kind)
        if current == BYPASS:
            if not self._probes.due(load):
                return BYPASS
            return PROBE if rival is None else self._try(rival)
        assert current is not None, "the arms were compared"
        self._since_trial += 1
        every = self._trial_every.get(load.kind, 0)
        if rival == BYPASS and self._since_trial >= every:
            self._trial_every[load.kind] = min(max(_SOON, 2 * every), _LATE)
            return self._try(BYPASS)
        self._since_whole = 0 if current == self._length else self._since_whole + 1
        return self._length if self._since_whole % _WHOLE_EVERY == 0 else current

    def doubt(self, load: Load) -> None:
        """What was known of the arms' costs is old: try plain decoding soon."""
        self._trial_every[load.kind] = _SOON

    def passed(self, load: Load, step_ms: float, plain_ms: float, *, drafted: bool) -> None:
        """A step took so long; plain_ms is what one without drafting takes."""
        self._probes.passed(step_ms)
        if drafted != (self.current(load) == BYPASS):
            return
        if drafted:
            self._probes.probed(step_ms - plain_ms)
        if not self._trial[1]:
            self._news, self._asked = True, drafted

    def _try(self, arm: int) -> int:
        self._trial, self._since_trial = (arm, _TRIAL - 1), 0
        return arm
