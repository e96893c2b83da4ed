"""What is recorded of one transition: the same facts for the event log and for the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_morph.controller.outcome import Outcome
from sglang_morph.controller.signals import Signals

Phase = Literal["lower", "reclaim", "restore"]


@dataclass(frozen=True, slots=True)
class TransitionRecord:
    """One outcome of a transition, and why it was made."""

    revision: int
    """Number of the state of the weights after it; a transition that changed nothing keeps it."""
    reason: str
    signals: Signals
    """The reading that triggered it."""
    outcome: Outcome

    @property
    def phase(self) -> Phase:
        """What `outcome.duration_s` was spent on."""
        if self.outcome.result == "started":
            return "reclaim"
        return "lower" if self.outcome.to_level > self.outcome.from_level else "restore"
