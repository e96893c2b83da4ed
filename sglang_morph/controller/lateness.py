"""Requests that wait although there is room for them: others are being computed.

Lower precision helps them only where it computes faster, as FP8 does on a GPU; int8 on a CPU
computes prompts more slowly. So a policy counts lateness only if it is told from when on.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_morph.controller.signals import Signals

_OVER = 0.5
"""Share of the wait from which a request is late, up to which nobody is late any more."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """Reads off the head of the queue whether time is short."""

    enter_s: float | None
    """Wait from which the oldest waiting request is late, seconds; None: never."""

    def holds(self, signals: Signals) -> bool:
        return self.enter_s is not None and signals.oldest_wait_s >= self.enter_s

    def is_over(self, signals: Signals) -> bool:
        return self.enter_s is None or signals.oldest_wait_s <= _OVER * self.enter_s

    def reason(self, signals: Signals) -> str:
        return f"late, oldest wait {signals.oldest_wait_s:.2f} s >= {self.enter_s:.2f} s"
