"""The policy interface: signals in, a target level out. Plain Python, replayable on recordings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang_morph.controller.signals import Signals


@dataclass(frozen=True, slots=True)
class Decision:
    """Go to `target` level because of `reason` (short, for the event log)."""

    target: int
    reason: str


class Policy(ABC):
    """Decides the precision level. `observe` is called once per tick, in order of time."""

    name: ClassVar[str]
    max_level: int
    """Highest level it may choose."""

    @property
    def relieves(self) -> bool:
        """Whether precision may fall now in place of a retraction, without asking `observe`."""
        return True

    def may_lower(self, now: float) -> bool:
        """Whether dwell, cap and budget would let precision fall now, to keep cached prefixes."""
        return False

    @abstractmethod
    def observe(self, signals: Signals) -> Decision | None:
        """Take note of `signals`; the level wanted now, or None to stay. Constant time."""

    @abstractmethod
    def moved(self, now: float, level: int) -> None:
        """A transition ended at `level` (also one the policy did not ask for). Starts the dwell."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Name and parameters, for `/morph/status` and the event log."""
