"""How a command went."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_morph.controller.monitor import TransitionResult


@dataclass(frozen=True, slots=True)
class Outcome:
    """Pages are counts, times are seconds.

    A restore has two: `started` (pages taken back) and, later, `completed` (weights are back).
    """

    from_level: int
    to_level: int
    """The level aimed at, reached once `result` is `completed`."""
    result: TransitionResult
    pages_lent: int = 0
    pages_withdrawn: int = 0
    pages_migrated: int = 0
    pages_evicted: int = 0
    duration_s: float = 0.0
    error: str | None = None
    """What failed (`rolled_back`) or stood in the way (`deferred`)."""
