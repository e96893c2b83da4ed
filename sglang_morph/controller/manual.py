"""The policy that follows an operator: it wants the level it was told."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang_morph.controller.policy import Decision, Policy
from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.controller.signals import Signals


class ManualPolicy(Policy):
    """Wants the level set last, from the first tick on level 0, until the scheduler is there."""

    name: ClassVar[str] = "manual"

    def __init__(self, options: PolicyOptions, top_level: int) -> None:
        """`top_level` is the plan's last level; `options.max_level` may lower the limit."""
        self.max_level = options.ceiling(top_level)
        self._wanted = 0

    @property
    def relieves(self) -> bool:
        """Precision is the operator's alone; SGLang may retract."""
        return False

    @property
    def wanted(self) -> int:
        """The level the operator asked for."""
        return self._wanted

    def set_level(self, level: int) -> None:
        """Ask for `level`. Raises ValueError, naming the allowed range, and changes nothing."""
        if type(level) is not int or not 0 <= level <= self.max_level:
            raise ValueError(f"level {level!r} is not available: give 0 to {self.max_level}")
        self._wanted = level

    def observe(self, signals: Signals) -> Decision | None:
        if signals.level == self._wanted:
            return None
        return Decision(self._wanted, f"operator asked for level {self._wanted}")

    def moved(self, now: float, level: int) -> None:
        """Nothing to note: only the operator changes what is wanted."""

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "max_level": self.max_level, "wanted": self._wanted}
