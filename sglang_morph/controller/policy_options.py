"""The options of all policies, one field a flag, and the checks they share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Parameters = TypeVar("Parameters", bound=DataclassInstance)


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """`--morph-*` flags that say how the level is decided. Seconds, and pressures as fractions.

    None means the policy's own default; where the policy has modes, the mode's.
    """

    policy: str = "threshold"
    """Name of a registered `Policy`."""
    max_level: int | None = None
    """Highest precision level the policy may choose; None means the plan's last."""
    mode: str = "default"
    """Set of defaults of the `threshold` policy: `accuracy`, `default` or `performance`."""
    enter_pressure: float | None = None
    """Used KV pages (evictable ones do not count) over those that exist now, base and lent, at or
    above which precision falls. For `two_mode`: used and wanted pages over base pages."""
    leave_pressure: float | None = None
    """Used KV pages over *base* pages, at or below which precision returns."""
    enter_queue_delay_s: float | None = None
    """Age of the oldest waiting request, while none is admitted, above which precision falls."""
    enter_late_s: float | None = None
    """Age of the oldest waiting request from which precision falls also where there is room for it,
    for hardware that computes lower precision faster (`Lateness`); None: it never does."""
    enter_hold_s: float | None = None
    """How much longer an enter condition must hold than it does not."""
    leave_hold_s: float | None = None
    """How long the leave condition must hold without a break."""
    min_dwell_s: float | None = None
    """Shortest stay at a level before the policy may leave it (an emergency may go up earlier)."""
    max_transitions_per_minute: int | None = None
    """Most level changes in any 60 s. The last one is kept for the return to full precision."""
    lookahead_s: float | None = None
    """How far the `threshold` policy looks ahead along the excess of arriving over served tokens;
    0 does not."""
    ttft_target_s: float | None = None
    """`slo`: time to first token to keep at the percentile."""
    tpot_target_s: float | None = None
    """`slo`: time per output token after the first to keep at the percentile."""
    slo_percentile: float = 95.0
    """Percentile at which TTFT and TPOT are reported and compared with their targets."""
    quality_budget: float | None = None
    """`slo`: share of time that may pass below full precision; 1 sets no limit."""
    quality_burst_s: float | None = None
    """`slo`: seconds below full precision that may be spent ahead of the budget."""
    two_mode_solution: str | None = None
    """`two_mode`: file written by `sglang-morph policy solve`; None takes the built-in one."""

    @classmethod
    def of(cls, options: object) -> PolicyOptions:
        """The fields that `options` has, as `PolicyOptions`."""
        if isinstance(options, cls):
            return options
        names = (field.name for field in fields(cls) if hasattr(options, field.name))
        return cls(**{name: getattr(options, name) for name in names})

    def ceiling(self, top_level: int) -> int:
        """Highest level a policy may choose. Raises ValueError for a negative `max_level`."""
        if self.max_level is None:
            return top_level
        if self.max_level < 0:
            raise ValueError(f"--morph-max-level is {self.max_level}: give 0 (stay there) or more")
        return min(self.max_level, top_level)

    def override(self, preset: Parameters) -> Parameters:
        """`preset` with those fields replaced that an option of the same name sets."""
        names = (field.name for field in fields(preset))
        given = {name: getattr(self, name, None) for name in names}
        return replace(preset, **{k: v for k, v in given.items() if v is not None})


def flag(name: str) -> str:
    """The flag of an option."""
    return "--morph-" + name.replace("_", "-")


def check_seconds(parameters: Any, *names: str) -> None:
    """Raises ValueError unless each is finite and not negative."""
    for name in names:
        seconds = getattr(parameters, name)
        if not 0 <= seconds < inf:
            raise ValueError(f"{flag(name)} is {seconds}: give seconds, 0 or more")


def check_positive(parameters: Any, *names: str) -> None:
    """Raises ValueError unless each is finite and above 0."""
    for name in names:
        seconds = getattr(parameters, name)
        if not 0 < seconds < inf:
            raise ValueError(f"{flag(name)} is {seconds}: give seconds above 0")


def check_cap(max_transitions_per_minute: int) -> None:
    """Raises ValueError unless one move down and its return fit into a minute."""
    if max_transitions_per_minute < 2:
        raise ValueError(
            f"{flag('max_transitions_per_minute')} is {max_transitions_per_minute}: give 2 or "
            "more, one to lower precision and one to restore it"
        )
