"""What an operator allows the level to do: limits for policies, emergencies and operators alike."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from sglang_morph.controller.guards import MINUTE_S
from sglang_morph.controller.policy import Decision

MOST_PER_MINUTE = 600
"""Highest cap that can be set; that many moves are remembered."""


def is_rate(gb_per_s: float) -> bool:
    """Whether uploads can be limited to it."""
    return 0 < gb_per_s < math.inf


@dataclass(frozen=True, slots=True)
class Limits:
    """None and False set no limit."""

    lowest_level: int | None = None
    highest_level: int | None = None
    max_transitions_per_minute: int | None = None
    """Level changes in any 60 s, whoever asked for them; the last is kept for a restore."""
    hold: bool = False
    """No transition begins; one under way ends."""
    restore_gb_per_s: float | None = None
    """How fast weights are uploaded, on average, while forwards go on; 10^9 bytes a second."""

    def check(self, top_level: int) -> None:
        """Raises ValueError, naming the field, for limits that the plan or each other rule out."""
        lowest, highest = self.lowest_level or 0, self.highest_level
        for name, level in (("lowest_level", lowest), ("highest_level", highest)):
            if level is not None and not 0 <= level <= top_level:
                raise ValueError(f"{name} {level} is not available: give 0 to {top_level}")
        if highest is not None and lowest > highest:
            raise ValueError(f"lowest_level {lowest} is above highest_level {highest}")
        cap = self.max_transitions_per_minute
        if cap is not None and not 2 <= cap <= MOST_PER_MINUTE:
            raise ValueError(
                f"max_transitions_per_minute is {cap}: give 2 (one to lower precision, one to "
                f"restore it) to {MOST_PER_MINUTE}"
            )
        if self.restore_gb_per_s is not None and not is_rate(self.restore_gb_per_s):
            raise ValueError(
                f"restore_gb_per_s is {self.restore_gb_per_s}: give more than 0, or none at all"
            )


class LimitGuard:
    """Holds the limits in force and the times of the latest moves. Constant time."""

    def __init__(self, top_level: int) -> None:
        self.top_level = top_level
        self.limits = Limits()
        self._moves: deque[float] = deque(maxlen=MOST_PER_MINUTE)

    @property
    def lowest(self) -> int:
        return self.limits.lowest_level or 0

    @property
    def highest(self) -> int:
        highest = self.limits.highest_level
        return self.top_level if highest is None else highest

    def allow_return(self, level: int) -> bool:
        """Whether precision may come back as far as `level`."""
        return not self.limits.hold and self.lowest <= level

    def describe(self) -> dict[str, Any]:
        return asdict(self.limits)

    def moved(self, now: float) -> None:
        """A transition ended. Monotonic seconds."""
        self._moves.append(now)

    def bound(
        self, decision: Decision | None, level: int, now: float
    ) -> tuple[Decision | None, str | None]:
        """What may come of `decision` at `level`, and what stands in the way of the rest.

        Without a decision the level is still brought within limits that have become narrower.
        """
        wanted = level if decision is None else decision.target
        target = min(max(wanted, self.lowest), self.highest)
        note = f"limits allow levels {self.lowest} to {self.highest}"
        if target == level:
            return None, note if wanted != level else None
        if obstacle := self.obstacle(level, target, now):
            return None, obstacle
        if target == wanted and decision is not None:
            return decision, None
        reason = note if decision is None else f"{decision.reason}; {note}"
        return Decision(target, reason), None

    def obstacle(self, level: int, target: int, now: float) -> str | None:
        """Why no transition from `level` to `target` may begin now."""
        if self.limits.hold:
            return "an operator holds the level (POST /morph/limits)"
        cap = self.limits.max_transitions_per_minute
        if cap is None:
            return None
        free = cap - 1 if target > level else cap
        if len(self._moves) >= free and now - self._moves[-free] < MINUTE_S:
            return f"limits allow {cap} transitions per minute, the last one for a restore"
        return None
