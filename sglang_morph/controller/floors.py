"""Floors: how far precision may fall while certain requests run. Plain Python: no SGLang.

A floor is the highest precision level a request allows. The lowest floor in force is the *ceiling*
that decisions on the level keep to.
"""

from __future__ import annotations

from sglang_morph.controller.policy import Decision


class Floors:
    """Floors of the requests that run, and of the one that is next in line. Constant time."""

    def __init__(self, top_level: int) -> None:
        self._top = top_level
        self._running = [0] * (top_level + 1)
        """How many requests run with each floor."""
        self._next: int | None = None

    @property
    def running(self) -> int:
        """The lowest floor of a running request; the top level without any."""
        return next((floor for floor, number in enumerate(self._running) if number), self._top)

    @property
    def ceiling(self) -> int:
        """The highest level that decisions may choose."""
        return self.running if self._next is None else min(self.running, self._next)

    @property
    def running_requests(self) -> int:
        return sum(self._running)

    def admit(self, floor: int) -> None:
        self._running[floor] += 1

    def release(self, floor: int) -> None:
        """Raises ValueError where no request with `floor` runs: one was counted twice."""
        if not self._running[floor]:
            raise ValueError(f"no running request has floor {floor}")
        self._running[floor] -= 1

    def expect(self, floor: int | None) -> None:
        """The next request in line has `floor`; None: none that is in line has one.

        From here on the level must come down to it and stay, even where the request lacks room
        rather than precision: else memory would be lent for it, at a level it refuses.
        """
        self._next = floor

    def bound(self, decision: Decision | None, level: int) -> tuple[Decision | None, str | None]:
        """What may come of `decision` at `level`, and what stands in the way of the rest.

        A level above the ceiling must be left, whatever was decided.
        """
        ceiling = self.ceiling
        wanted = level if decision is None else decision.target
        if wanted <= ceiling:
            return decision, None
        note = f"a request allows level {ceiling} at most"
        if ceiling == level:
            return None, note
        reason = note if decision is None else f"{decision.reason}; {note}"
        return Decision(ceiling, reason), None

    def permit(self, decision: Decision | None, level: int) -> bool:
        """Whether `decision` leaves every running request what it was promised."""
        return decision is None or decision.target <= max(level, self.running)
