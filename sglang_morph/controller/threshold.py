"""The default policy: two thresholds with hysteresis, persistence and a minimum dwell."""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar

from sglang_morph.controller.policy import Decision, Policy
from sglang_morph.controller.signals import Signals
from sglang_morph.options import MorphOptions


class _Held:
    """How long a condition has held without a break.

    One interval between readings counts for at most half of `required_s`, so at least three
    readings must agree (unless `required_s` is 0). A stalled loop or a jump of the clock is thus
    no evidence by itself, while a loop whose every step is slow still gets its decision.
    """

    def __init__(self, required_s: float) -> None:
        self.required_s = required_s
        self._longest_step_s = required_s / 2
        self._since: float | None = None
        self._last = 0.0

    @property
    def seconds(self) -> float:
        """Time counted so far."""
        return 0.0 if self._since is None else self._last - self._since

    def reset(self) -> None:
        self._since = None

    def observe(self, now: float, condition: bool) -> bool:
        """Take in one reading; whether the condition has held long enough."""
        if not condition:
            self.reset()
            return False
        if self._since is None:
            self._since = now
        else:
            step = now - self._last
            # Shifting the start drops what the step has in excess (or all of a step backwards).
            self._since += step - min(max(step, 0.0), self._longest_step_s)
        self._last = now
        return self.seconds >= self.required_s


class ThresholdPolicy(Policy):
    """More levels while memory is short, none once the load fits the base pages again.

    **Up** when, for `enter_hold_s` without a break, either the pages in use reach `enter_pressure`
    of the capacity that exists now, or the head of the queue finds no room and is older than
    `enter_queue_delay_s`. At level 0 capacity is the base, so the first test reads `pressure >=
    enter_pressure`; at a higher level the pages already lent raise the threshold in proportion.
    Held against the base alone, a load that fits well into the lent pages would climb to the last
    level for nothing. The first move goes up one level. If the condition has not let up once when
    the dwell is over, the next goes two, then four: a burst steeper than the plan's steps should
    not have to wait out a dwell for each of them.

    **Down** when pressure, which counts over the *base* pages, stays at or below `leave_pressure`
    and nothing waits, for `leave_hold_s`. What is in use then fits the base pages (`leave_pressure`
    is below 1), so no lent page is needed at any level: the target is 0 in one decision, not one
    level less. A reclaim is atomic and a restore is bounded by copy speed, so intermediate stops
    would only keep precision low for longer.

    Between the thresholds nothing happens, and nothing does within `min_dwell_s` of a transition.
    """

    name: ClassVar[str] = "threshold"

    def __init__(self, options: MorphOptions, top_level: int) -> None:
        """`top_level` is the plan's last level. Raises ValueError for contradicting options."""
        _check(options)
        self._options = options
        self.max_level = (
            top_level if options.max_level is None else min(options.max_level, top_level)
        )
        self._rise = _Held(options.enter_hold_s)
        self._fall = _Held(options.leave_hold_s)
        self._moved_at = -inf
        self._level = 0
        self._rises_in_a_row = 0

    def observe(self, signals: Signals) -> Decision | None:
        now, level = signals.now, signals.level
        crowded = self._is_full(signals) or self._is_blocked(signals)
        calm = signals.pressure <= self._options.leave_pressure and signals.waiting == 0
        if not crowded:
            self._rises_in_a_row = 0
        self._level = level
        rise = self._rise.observe(now, crowded)
        fall = self._fall.observe(now, calm)
        if now - self._moved_at < self._options.min_dwell_s:
            return None
        if rise and level < self.max_level:
            target = min(level + 2**self._rises_in_a_row, self.max_level)
            return Decision(target, self._reason_to_rise(signals))
        if fall and level > 0:
            return Decision(0, self._reason_to_fall(signals))
        return None

    def moved(self, now: float, level: int) -> None:
        self._rises_in_a_row = self._rises_in_a_row + 1 if level > self._level else 0
        self._level = level
        self._moved_at = now
        self._rise.reset()
        self._fall.reset()

    def describe(self) -> dict[str, Any]:
        options = self._options
        return {
            "name": self.name,
            "max_level": self.max_level,
            "enter_pressure": options.enter_pressure,
            "leave_pressure": options.leave_pressure,
            "enter_queue_delay_s": options.enter_queue_delay_s,
            "enter_hold_s": options.enter_hold_s,
            "leave_hold_s": options.leave_hold_s,
            "min_dwell_s": options.min_dwell_s,
        }

    def _enter_threshold(self, signals: Signals) -> float:
        """The pressure (over base pages) at which the capacity of this moment is nearly full."""
        return self._options.enter_pressure * signals.capacity_pages / signals.base_pages

    def _is_full(self, signals: Signals) -> bool:
        return signals.pressure >= self._enter_threshold(signals)

    def _is_blocked(self, signals: Signals) -> bool:
        return (
            signals.admission_blocked and signals.oldest_wait_s >= self._options.enter_queue_delay_s
        )

    def _reason_to_rise(self, signals: Signals) -> str:
        if self._is_full(signals):
            cause = f"pressure {signals.pressure:.2f} >= {self._enter_threshold(signals):.2f}"
        else:
            delay = self._options.enter_queue_delay_s
            cause = f"admission blocked, oldest wait {signals.oldest_wait_s:.2f} s >= {delay:.2f} s"
        return f"{cause} for {self._rise.seconds:.2f} s"

    def _reason_to_fall(self, signals: Signals) -> str:
        threshold = self._options.leave_pressure
        cause = f"pressure {signals.pressure:.2f} <= {threshold:.2f} and nothing waits"
        return f"{cause} for {self._fall.seconds:.2f} s"


def _check(options: MorphOptions) -> None:
    enter, leave = options.enter_pressure, options.leave_pressure
    if not 0 < enter <= 1:
        raise ValueError(
            f"--morph-enter-pressure is {enter}: give a fraction of the pages, above 0, at most 1"
        )
    if not 0 <= leave < enter:
        raise ValueError(
            f"--morph-leave-pressure is {leave}, --morph-enter-pressure {enter}: "
            "the first must be 0 or more and below the second"
        )
    if options.max_level is not None and options.max_level < 0:
        raise ValueError(f"--morph-max-level is {options.max_level}: give 0 (stay there) or more")
    for name in ("enter_queue_delay_s", "enter_hold_s", "leave_hold_s", "min_dwell_s"):
        seconds = getattr(options, name)
        if not 0 <= seconds < inf:
            flag = "--morph-" + name.replace("_", "-")
            raise ValueError(f"{flag} is {seconds}: give seconds, 0 or more")
