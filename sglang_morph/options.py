"""The options that turn SGLang into sglang_morph, as one immutable value.

Every process reads the same `MorphOptions`: the launcher builds it from the command line, the
scheduler receives it inside `MorphServerArgs` or, under stock entry points, from the environment.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MorphOptions:
    """Resolved `--memory-backend` and `--morph-*` flags. Times: seconds; pressures: fractions."""

    memory_backend: str = "static"
    """`static` (stock SGLang) or the name of a registered `MemoryBackend`."""
    policy: str = "threshold"
    """Name of a registered `Policy`."""
    variants: tuple[str, ...] = ()
    """Variants in the order in which a layer takes them; empty means the device's default."""
    plan: str | None = None
    """Path of a precision plan; None means a default plan in `order`."""
    order: str = "front"
    """Order of the default plan: `front` (first decoder layer first) or `back`."""
    max_level: int | None = None
    """Highest precision level the policy may choose; None means the plan's last."""
    enter_pressure: float = 0.85
    """Used KV pages (evictable ones do not count) over those that exist now, base and lent, at or
    above which precision falls."""
    leave_pressure: float = 0.60
    """Used KV pages over *base* pages, at or below which precision returns."""
    enter_queue_delay_s: float = 0.1
    """Age of the oldest waiting request, while none is admitted, above which precision falls."""
    enter_hold_s: float = 0.2
    """How long an enter condition must hold without a break."""
    leave_hold_s: float = 2.0
    """How long the leave condition must hold without a break."""
    min_dwell_s: float = 1.0
    """Shortest stay at a level before the policy may leave it (an emergency may go up earlier)."""
    event_log: str | None = None
    """Path of the JSONL event log; None writes none."""
    sample_interval_s: float = 0.25
    """Shortest time between two `signals` rows in the event log."""

    @property
    def is_static(self) -> bool:
        return self.memory_backend == "static"
