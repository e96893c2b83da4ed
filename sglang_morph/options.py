"""The options that turn SGLang into sglang_morph, as one immutable value.

Every process reads the same `MorphOptions`: the launcher builds it from the command line, the
scheduler receives it inside `MorphServerArgs` or, under stock entry points, from the environment.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_morph.controller.policy_options import PolicyOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphOptions(PolicyOptions):
    """Resolved `--memory-backend` and `--morph-*` flags: the policy's, and these."""

    memory_backend: str = "static"
    """`static` (stock SGLang) or the name of a registered `MemoryBackend`."""
    variants: tuple[str, ...] = ()
    """Variants in the order in which a layer takes them; empty means the device's default."""
    plan: str | None = None
    """Path of a precision plan; None means a default plan in `order`."""
    levels: tuple[int, ...] = ()
    """Plan steps applied at level 1, 2, ...; empty means the plan's own."""
    order: str = "front"
    """Order of the default plan: `front` (first decoder layer first) or `back`."""
    event_log: str | None = None
    """Path of the JSONL event log; None writes none."""
    sample_interval_s: float = 0.25
    """Shortest time between two `signals` rows in the event log."""

    @property
    def is_static(self) -> bool:
        return self.memory_backend == "static"
