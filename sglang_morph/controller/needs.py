"""Needs: how far precision must fall for requests longer than the KV cache at full precision.

The counterpart of floors. A need is the lowest level at which a request fits the KV cache alone.
The highest need in force bounds decisions on the level from below. Plain Python: no SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_morph.controller.policy import Decision


class Needs:
    """Needs of the requests that run, and of the one that is next in line. Constant time."""

    def __init__(self, level_pages: Sequence[int]) -> None:
        """`level_pages`: KV pages that exist at each level, from 0 on."""
        self._level_pages = level_pages
        self._running = [0] * len(level_pages)
        """How many requests run with each need."""
        self._next = 0

    def level_for(self, pages: int) -> int:
        """The lowest level with so many pages; the deepest where none has."""
        fitting = (level for level, held in enumerate(self._level_pages) if held >= pages)
        return next(fitting, len(self._level_pages) - 1)

    @property
    def running(self) -> int:
        """The highest need of a running request; 0 without any."""
        return max((need for need, number in enumerate(self._running) if number), default=0)

    @property
    def running_requests(self) -> int:
        """Those that don't fit at level 0."""
        return sum(self._running[1:])

    def admit(self, need: int) -> None:
        self._running[need] += 1

    def release(self, need: int) -> None:
        """Raises ValueError where no request with `need` runs: one was counted twice."""
        if not self._running[need]:
            raise ValueError(f"no running request has need {need}")
        self._running[need] -= 1

    def expect(self, need: int) -> None:
        """The next request in line has `need`; 0: it has none."""
        self._next = need

    def bound(
        self, decision: Decision | None, level: int, highest: int
    ) -> tuple[Decision | None, str | None]:
        """What becomes of `decision` at `level`, and what stands in the way of it.

        Precision falls at once for the next in line, unless that takes more than `highest`.
        """
        lowest = max(self.running, self._next if self._next <= highest else 0)
        wanted = level if decision is None else decision.target
        if wanted >= lowest:
            return decision, None
        note = f"a request is too long for less than level {lowest}"
        if lowest == level:
            return None, note
        return Decision(lowest, note if decision is None else f"{decision.reason}; {note}"), None

    def permit(self, decision: Decision | None, level: int) -> bool:
        """Whether `decision` leaves every running request the pages that it may come to need."""
        return decision is None or decision.target >= min(level, self.running)
