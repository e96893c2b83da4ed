"""The default policy: two thresholds with hysteresis, persistence and a minimum dwell."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from sglang_morph.controller.guards import Hysteresis
from sglang_morph.controller.lateness import Lateness
from sglang_morph.controller.policy import Decision, Policy
from sglang_morph.controller.policy_options import (
    PolicyOptions,
    check_cap,
    check_positive,
    check_seconds,
)
from sglang_morph.controller.rates import RateWindow
from sglang_morph.controller.signals import Signals


@dataclass(frozen=True, slots=True)
class ThresholdParameters:
    """Where an option of the same name exists, its description holds here."""

    enter_pressure: float = 0.85
    leave_pressure: float = 0.60
    enter_queue_delay_s: float = 0.1
    enter_late_s: float | None = None
    enter_hold_s: float = 0.2
    leave_hold_s: float = 4.0
    min_dwell_s: float = 1.0
    max_transitions_per_minute: int = 12
    lookahead_s: float = 0.0
    first_step: int = 1
    """Levels of the first move; as long as the condition does not let up, each next one doubles."""
    level_share: float = 1.0
    """Share of the plan's levels that may be used (rounded up), unless a highest one is given."""

    def check(self) -> None:
        """Raises ValueError for values that are out of range or contradict each other."""
        enter, leave = self.enter_pressure, self.leave_pressure
        if not 0 < enter <= 1:
            raise ValueError(
                f"--morph-enter-pressure is {enter}: give a fraction of the pages, above 0, "
                "at most 1"
            )
        if not 0 <= leave < enter:
            raise ValueError(
                f"--morph-leave-pressure is {leave}, --morph-enter-pressure {enter}: "
                "the first must be 0 or more and below the second"
            )
        check_seconds(
            self,
            "enter_queue_delay_s",
            "enter_hold_s",
            "leave_hold_s",
            "min_dwell_s",
            "lookahead_s",
        )
        check_cap(self.max_transitions_per_minute)
        if self.enter_late_s is not None:
            check_positive(self, "enter_late_s")


MODES: dict[str, ThresholdParameters] = {
    "accuracy": ThresholdParameters(
        enter_pressure=0.95,
        leave_pressure=0.75,
        enter_queue_delay_s=0.5,
        enter_hold_s=1.0,
        leave_hold_s=1.0,
        max_transitions_per_minute=8,
        level_share=0.5,
    ),
    "default": ThresholdParameters(),
    "performance": ThresholdParameters(
        enter_pressure=0.75,
        leave_pressure=0.50,
        enter_queue_delay_s=0.05,
        enter_hold_s=0.1,
        leave_hold_s=5.0,
        min_dwell_s=0.5,
        lookahead_s=1.0,
        first_step=2,
    ),
}
"""What `--morph-mode` stands for; a flag that is given replaces the mode's value."""


class ThresholdPolicy(Policy):
    """More levels while memory is short, none once the load fits the base pages again.

    **Up** when, for `enter_hold_s` longer than not, either the pages in use reach `enter_pressure`
    of the capacity that exists now, or the head of the queue finds no room and is older than
    `enter_queue_delay_s`. At level 0 capacity is the base, so the first test reads `pressure >=
    enter_pressure`; at a higher level the pages already lent raise the threshold in proportion.
    Held against the base alone, a load that fits well into the lent pages would climb to the last
    level for nothing. A move goes straight to the first level at which what is used and the prompts
    that wait would stay below `enter_pressure`: a burst steeper than the plan's steps should not
    have to wait out a dwell for each of them, while its queue builds up at full precision's speed.
    It goes up `first_step` levels at least, and twice, then four times as far while the condition
    does not let up, where the capacity of the levels is not known or requests grow past it.

    With an `enter_late_s`, a request that waits that long is a reason too where there is room for
    it (see `Lateness`); the levels that it takes are those of a condition that does not let up,
    since no level is known to be fast enough. Precision returns once nobody waits half as long.

    With a `lookahead_s`, pages count as in use that will be in that time if tokens go on arriving
    faster than they are served. That is the earliest sign of a burst, and a weak one: it counts
    only above `leave_pressure`, so a few long prompts on an idle server move nothing.

    **Down** when demand, which counts what waits too and over the *base* pages, stays at or below
    `leave_pressure`, and nobody is kept waiting for room, for `leave_hold_s`. What is in use then
    fits the base pages (`leave_pressure` is below 1), so no lent page is needed at any level: the
    target is 0 in one decision, not one level less. A reclaim is atomic and a restore is bounded by
    copy speed, so intermediate stops would only keep precision low for longer.

    Between the thresholds nothing happens, and nothing does within `min_dwell_s` of a transition.
    """

    name: ClassVar[str] = "threshold"

    def __init__(self, options: PolicyOptions, top_level: int) -> None:
        """`top_level` is the plan's last level. Raises ValueError for contradicting options."""
        if options.mode not in MODES:
            raise ValueError(
                f"--morph-mode is {options.mode!r}: give one of {', '.join(sorted(MODES))}"
            )
        self._mode = options.mode
        self.parameters = options.override(MODES[options.mode])
        self.parameters.check()
        share = 1.0 if options.max_level is not None else self.parameters.level_share
        self.max_level = min(options.ceiling(top_level), -int(-top_level * share // 1))
        self._guard = Hysteresis(
            self.parameters.enter_hold_s,
            self.parameters.leave_hold_s,
            self.parameters.min_dwell_s,
            self.parameters.max_transitions_per_minute,
        )
        self._lateness = Lateness(self.parameters.enter_late_s)
        self._arrived = RateWindow()
        self._served = RateWindow()
        self._level = 0
        self._rises_in_a_row = 0

    def observe(self, signals: Signals) -> Decision | None:
        level = signals.level
        used = self._expected_pages(signals) if self.parameters.lookahead_s else signals.used_pages
        full = used >= self.parameters.enter_pressure * signals.capacity_pages
        blocked = signals.is_blocked(self.parameters.enter_queue_delay_s)
        crowded = full or blocked or self._lateness.holds(signals)
        fits = signals.fits_base(self.parameters.leave_pressure)
        calm = fits and self._lateness.is_over(signals)
        if not crowded:
            self._rises_in_a_row = 0
        self._level = level
        self._guard.observe(signals.now, crowded, calm)
        if self._guard.may_lower and level < self.max_level:
            target = min(self._level_to_rise_to(signals), self.max_level)
            return Decision(target, self._reason_to_rise(signals, used if full else None))
        if self._guard.may_restore and level > 0:
            return Decision(0, self._reason_to_fall(signals))
        return None

    def may_lower(self, now: float) -> bool:
        return self._guard.limit.may_lower(now)

    def moved(self, now: float, level: int) -> None:
        self._rises_in_a_row = self._rises_in_a_row + 1 if level > self._level else 0
        self._level = level
        self._guard.moved(now)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "mode": self._mode,
            "max_level": self.max_level,
            **asdict(self.parameters),
        }

    def _level_to_rise_to(self, signals: Signals) -> int:
        step = self.parameters.first_step * 2**self._rises_in_a_row
        wanted = (signals.used_pages + signals.waiting_tokens) / self.parameters.enter_pressure
        roomy = (k for k, pages in enumerate(signals.level_pages) if pages >= wanted)
        return max(signals.level + step, next(roomy, len(signals.level_pages) - 1))

    def _expected_pages(self, signals: Signals) -> float:
        """Pages in use after `lookahead_s`, if arrivals go on exceeding service."""
        self._arrived.add(signals.now, signals.arrived_tokens_total)
        self._served.add(signals.now, signals.served_tokens_total)
        if signals.pressure <= self.parameters.leave_pressure:
            return signals.used_pages
        excess = max(0.0, self._arrived.per_s - self._served.per_s)
        return signals.used_pages + excess * self.parameters.lookahead_s

    def _reason_to_rise(self, signals: Signals, used: float | None) -> str:
        delay = self.parameters.enter_queue_delay_s
        if used is not None:
            threshold = self.parameters.enter_pressure * signals.capacity_pages / signals.base_pages
            what = "pressure" if used == signals.used_pages else "expected pressure"
            cause = f"{what} {used / signals.base_pages:.2f} >= {threshold:.2f}"
        elif not signals.is_blocked(delay):
            cause = self._lateness.reason(signals)
        else:
            cause = f"admission blocked, oldest wait {signals.oldest_wait_s:.2f} s >= {delay:.2f} s"
        return f"{cause} for {self._guard.enter.seconds:.2f} s"

    def _reason_to_fall(self, signals: Signals) -> str:
        threshold = self.parameters.leave_pressure
        cause = f"demand {signals.demand:.2f} <= {threshold:.2f} and nothing is held up"
        return f"{cause} for {self._guard.leave.seconds:.2f} s"
