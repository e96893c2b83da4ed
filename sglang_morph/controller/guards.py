"""What keeps a policy from flapping: persistence, minimum dwell, a cap on moves per minute.

Every policy but `manual` decides through a `Hysteresis`, so these promises hold for all of them.
That no transition starts while another is unfinished is the controller's part.
"""

from __future__ import annotations

from collections import deque
from math import inf

MINUTE_S = 60.0


class Held:
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


class Prevailing:
    """How much longer a condition has held than it has not, lately; 0 at least.

    A server whose memory is short reads as having room again and again for a step or two, whenever
    a request ends and the next one has not been tried: at 40 requests a second that would start a
    `Held` anew for as long as the shortage lasts. So a break only counts against the condition, for
    as long as it was. What is counted stops at `required_s`: no shortage is remembered for longer.
    Intervals count as in `Held`: at least three readings must agree.
    """

    def __init__(self, required_s: float) -> None:
        self.required_s = required_s
        self._longest_step_s = required_s / 2
        self._held = False
        self._last: float | None = None
        self.seconds = 0.0
        """Time counted so far."""

    def reset(self) -> None:
        self._held, self.seconds = False, 0.0

    def observe(self, now: float, condition: bool) -> bool:
        """Take in one reading; whether the condition holds and has prevailed long enough."""
        step = 0.0 if self._last is None else max(0.0, now - self._last)
        if not condition:
            self.seconds = max(0.0, self.seconds - step)
        elif self._held:
            self.seconds = min(self.required_s, self.seconds + min(step, self._longest_step_s))
        self._held, self._last = condition, now
        return condition and self.seconds >= self.required_s


class MoveLimit:
    """Minimum dwell, and at most `max_per_minute` moves in any 60 s.

    The last move of a minute is kept for a restore: lowering asks for two free places. So a
    restore never waits for the cap, unless moves that no policy asked for have used it up.
    """

    def __init__(self, min_dwell_s: float, max_per_minute: int) -> None:
        self._min_dwell_s = min_dwell_s
        self._moves: deque[float] = deque([-inf] * max_per_minute, maxlen=max_per_minute)
        """Times of the latest moves, oldest first."""

    def moved(self, now: float) -> None:
        self._moves.append(now)

    def may_lower(self, now: float) -> bool:
        return self._dwelt(now) and now - self._moves[1] >= MINUTE_S

    def may_restore(self, now: float) -> bool:
        return self._dwelt(now) and now - self._moves[0] >= MINUTE_S

    def _dwelt(self, now: float) -> bool:
        return now - self._moves[-1] >= self._min_dwell_s


class Hysteresis:
    """Turns two conditions, read at every tick, into the permission to go up or down.

    To go up the reason must prevail, to go down it must hold without a break.
    """

    def __init__(
        self, enter_hold_s: float, leave_hold_s: float, min_dwell_s: float, max_per_minute: int
    ) -> None:
        self.enter = Prevailing(enter_hold_s)
        self.leave = Held(leave_hold_s)
        self.limit = MoveLimit(min_dwell_s, max_per_minute)
        self._may_lower = self._may_restore = False

    @property
    def may_lower(self) -> bool:
        """The reason to lower precision has held, and nothing forbids a move."""
        return self._may_lower

    @property
    def may_restore(self) -> bool:
        return self._may_restore

    def observe(self, now: float, enter: bool, leave: bool) -> None:
        """Take in one reading: whether there is reason to lower precision, and to restore it."""
        self._may_lower = self.enter.observe(now, enter) and self.limit.may_lower(now)
        self._may_restore = self.leave.observe(now, leave) and self.limit.may_restore(now)

    def moved(self, now: float) -> None:
        """A transition ended: dwell begins, and both conditions must hold anew."""
        self.limit.moved(now)
        self.enter.reset()
        self.leave.reset()
