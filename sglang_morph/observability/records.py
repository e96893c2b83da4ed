"""What is recorded of one transition: the same facts for the event log and for the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_morph.controller.monitor import TransitionResult
from sglang_morph.controller.signals import Signals

Phase = Literal["lower", "reclaim", "restore"]


@dataclass(frozen=True, slots=True)
class TransitionRecord:
    """One outcome of a transition, and why it was made. Pages are counts, times are seconds.

    A restore has two: `started` (pages taken back) and, later, `completed` (weights are back).
    """

    revision: int
    """Number of the state of the weights after it; a transition that changed nothing keeps it."""
    from_level: int
    to_level: int
    """The level aimed at, reached once `result` is `completed`."""
    reason: str
    result: TransitionResult
    signals: Signals
    """The reading that triggered it."""
    pages_lent: int = 0
    pages_withdrawn: int = 0
    pages_migrated: int = 0
    pages_evicted: int = 0
    duration_s: float = 0.0
    error: str | None = None
    """What failed (`rolled_back`) or stood in the way (`deferred`)."""

    @property
    def phase(self) -> Phase:
        """What `duration_s` was spent on."""
        if self.result == "started":
            return "reclaim"
        return "lower" if self.to_level > self.from_level else "restore"
