"""The policy that aims at latency targets within a quality budget, and learns its thresholds."""

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
    flag,
)
from sglang_morph.controller.signals import Signals

ENTER_LAX, ENTER_STRICT = 0.95, 0.70
"""Pages used over those that exist, from which precision falls: at urgency 0 and 1."""
LEAVE_LAX, LEAVE_STRICT = 0.65, 0.40
"""Pages used over base pages, up to which precision returns. All below every entry threshold."""
DELAY_LAX, DELAY_STRICT = 0.5, 0.1
"""Wait of the oldest blocked request that counts as a reason, as a share of the TTFT target."""
RISE_S, FALL_S = 5.0, 120.0
"""Seconds in which urgency goes from 0 to 1 under a twofold violation, and back without any."""
RELAXED = 0.8
"""Urgency falls only while latency is below this share of its target."""
LONGEST_STEP_S = 1.0
REFILL_SHARE = 0.25
"""Share of the burst that must be back before a spent budget allows lower precision again."""


@dataclass(frozen=True, slots=True)
class SloParameters:
    """The options of the same names."""

    ttft_target_s: float = 2.0
    tpot_target_s: float = 0.2
    quality_budget: float = 0.5
    quality_burst_s: float = 300.0
    enter_late_s: float | None = None
    enter_hold_s: float = 0.2
    leave_hold_s: float = 4.0
    min_dwell_s: float = 1.0
    max_transitions_per_minute: int = 12

    def check(self) -> None:
        """Raises ValueError for values that are out of range."""
        check_positive(self, "ttft_target_s", "tpot_target_s", "quality_burst_s")
        check_seconds(self, "enter_hold_s", "leave_hold_s", "min_dwell_s")
        check_cap(self.max_transitions_per_minute)
        if self.enter_late_s is not None:
            check_positive(self, "enter_late_s")
        if not 0 <= self.quality_budget <= 1:
            raise ValueError(
                f"{flag('quality_budget')} is {self.quality_budget}: give a share of time, 0 to 1"
            )


class Urgency:
    """A number in [0, 1] that grows while latency exceeds its target and shrinks when it is low.

    `load` is latency over target. Per second it changes by `min(load - 1, 1) / RISE_S` above 1, by
    `-1 / FALL_S` below `RELAXED`, and not at all between. The change never falls as `load` rises,
    and clipping keeps order: of two histories of which one is never lower, that one's urgency is
    never lower. Rising is 24 times faster than falling, so what a burst taught outlasts it.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._last: float | None = None

    def observe(self, now: float, load: float) -> None:
        step = 0.0 if self._last is None else min(max(now - self._last, 0.0), LONGEST_STEP_S)
        self._last = now
        if load > 1:
            self.value = min(1.0, self.value + step * min(load - 1, 1.0) / RISE_S)
        elif load < RELAXED:
            self.value = max(0.0, self.value - step / FALL_S)

    def between(self, lax: float, strict: float) -> float:
        """`lax` at urgency 0, `strict` at 1, a line between."""
        return lax + self.value * (strict - lax)


class QualityBudget:
    """An account of seconds below full precision: a token bucket.

    It earns `share` seconds a second up to `burst_s`, and pays one for each second below full
    precision. Over any span of T seconds that begins in credit, at most `share * T + burst_s`
    seconds are spent, plus what passes between the moment it is spent and the end of the restore.
    """

    def __init__(self, share: float, burst_s: float) -> None:
        self._share = share
        self._burst_s = burst_s
        self.credit_s = burst_s
        self._last: tuple[float, bool] | None = None
        self._spent = False

    @property
    def is_spent(self) -> bool:
        """Whether precision must be full: from zero credit until a part of the burst is back."""
        return self._spent

    def observe(self, now: float, lowered: bool) -> None:
        if self._last is not None:
            step, paying = max(now - self._last[0], 0.0), self._last[1]
            credit = self.credit_s + step * (self._share - (1.0 if paying else 0.0))
            self.credit_s = min(credit, self._burst_s)
        self._last = (now, lowered)
        if self.credit_s <= 0 and self._share < 1:
            self._spent = True
        elif self.credit_s >= REFILL_SHARE * self._burst_s:
            self._spent = False


class SloPolicy(Policy):
    """Thresholds between fixed limits, placed by how well the latency targets are met.

    **Load** is the worse of TTFT and TPOT over its target, each at the percentile the monitor
    reports; the wait of the oldest request counts as TTFT already, since its own can't be less.
    **Urgency** integrates it (see `Urgency`) and moves three thresholds: with more of it precision
    falls earlier (less pressure, shorter waits) and returns later.

    **Stability.** 1. Bounded: urgency is clipped to [0, 1], so every threshold stays in its band.
    2. Monotone: urgency is monotone in load, the thresholds in urgency; worse latency never delays
    a downshift nor hastens a restore. 3. No limit cycle under constant demand: a downshift by
    pressure needs `used >= enter * capacity >= 0.70 * base`, a restore needs `used <= leave * base
    <= 0.65 * base`, what waits included. The bands do not overlap, so no value of urgency makes one
    demand cause both; whatever urgency does, constant demand gives at most one change of direction,
    and the level is monotone from then on. Two things can still make it come and go: demand that
    itself shrinks when the server gets faster, for which lasting violations lower `leave` to 0.40
    within seconds while it takes two minutes to relax (but not if `enter_late_s` lowered precision:
    then waits of less than half of that suffice); and a spent budget, which has to interrupt. Its
    period is `REFILL_SHARE * quality_burst_s / quality_budget` seconds or more.

    **Budget.** When it is spent the target is level 0, whatever the pressure, and no emergency
    lowers precision either (`relieves`), until a quarter of the burst has been earned back.
    """

    name: ClassVar[str] = "slo"

    def __init__(self, options: PolicyOptions, top_level: int) -> None:
        """`top_level` is the plan's last level. Raises ValueError for contradicting options."""
        self.parameters = options.override(SloParameters())
        self.parameters.check()
        self.max_level = options.ceiling(top_level)
        self.urgency = Urgency()
        self.budget = QualityBudget(self.parameters.quality_budget, self.parameters.quality_burst_s)
        self._guard = Hysteresis(
            self.parameters.enter_hold_s,
            self.parameters.leave_hold_s,
            self.parameters.min_dwell_s,
            self.parameters.max_transitions_per_minute,
        )
        self._lateness = Lateness(self.parameters.enter_late_s)
        self._level = 0
        self._rises_in_a_row = 0

    @property
    def relieves(self) -> bool:
        return not self.budget.is_spent

    @property
    def enter_pressure(self) -> float:
        """Now, over the pages that exist."""
        return self.urgency.between(ENTER_LAX, ENTER_STRICT)

    @property
    def leave_pressure(self) -> float:
        """Now, over base pages."""
        return self.urgency.between(LEAVE_LAX, LEAVE_STRICT)

    @property
    def enter_queue_delay_s(self) -> float:
        """Now."""
        return self.parameters.ttft_target_s * self.urgency.between(DELAY_LAX, DELAY_STRICT)

    def observe(self, signals: Signals) -> Decision | None:
        now, level = signals.now, signals.level
        self.urgency.observe(now, self._load(signals))
        self.budget.observe(now, level > 0)
        full = signals.used_pages >= self.enter_pressure * signals.capacity_pages
        blocked = signals.is_blocked(self.enter_queue_delay_s)
        crowded = full or blocked or self._lateness.holds(signals)
        if not crowded:
            self._rises_in_a_row = 0
        self._level = level
        calm = signals.fits_base(self.leave_pressure) and self._lateness.is_over(signals)
        spent = self.budget.is_spent
        self._guard.observe(now, crowded and not spent, calm)
        if level > 0 and spent and self._guard.limit.may_restore(now):
            return Decision(0, f"the quality budget is spent ({self.budget.credit_s:.0f} s)")
        if self._guard.may_lower and level < self.max_level:
            target = min(level + 2**self._rises_in_a_row, self.max_level)
            return Decision(target, self._reason_to_rise(signals, full))
        if self._guard.may_restore and level > 0:
            return Decision(
                0,
                f"demand {signals.demand:.2f} <= {self.leave_pressure:.2f} and nothing is held up "
                f"for {self._guard.leave.seconds:.2f} s",
            )
        return None

    def may_lower(self, now: float) -> bool:
        return self._guard.limit.may_lower(now) and not self.budget.is_spent

    def moved(self, now: float, level: int) -> None:
        self._rises_in_a_row = self._rises_in_a_row + 1 if level > self._level else 0
        self._level = level
        self._guard.moved(now)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "max_level": self.max_level,
            **asdict(self.parameters),
            "urgency": self.urgency.value,
            "enter_pressure": self.enter_pressure,
            "leave_pressure": self.leave_pressure,
            "enter_queue_delay_s": self.enter_queue_delay_s,
            "quality_credit_s": self.budget.credit_s,
        }

    def _load(self, signals: Signals) -> float:
        ttft = max(signals.ttft_s, signals.oldest_wait_s)
        return max(
            ttft / self.parameters.ttft_target_s, signals.tpot_s / self.parameters.tpot_target_s
        )

    def _reason_to_rise(self, signals: Signals, full: bool) -> str:
        urgency = f"urgency {self.urgency.value:.2f}"
        if full:
            used = signals.used_pages / signals.capacity_pages
            return f"{used:.2f} of the pages used >= {self.enter_pressure:.2f} ({urgency})"
        wait, delay = signals.oldest_wait_s, self.enter_queue_delay_s
        if not signals.is_blocked(delay):
            return f"{self._lateness.reason(signals)} ({urgency})"
        return f"admission blocked, oldest wait {wait:.2f} s >= {delay:.2f} s ({urgency})"
