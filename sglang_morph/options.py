"""The options that turn SGLang into sglang_morph, as one immutable value.

Every process reads the same `MorphOptions`: the launcher builds it from the command line, the
scheduler receives it inside `MorphServerArgs` or, under stock entry points, from the environment.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_morph.controller.eviction_cost import EvictionParameters
from sglang_morph.controller.policy_options import PolicyOptions

_EVICTION = EvictionParameters()

FLOOR_POLICIES = ("hold", "reject", "ignore")
"""What happens to a request that asks for more precision than there is: it waits until precision
has come back, it is refused, or it is served and counted."""
PREFIX_POLICIES = ("share", "namespace", "refresh")
"""Cached prefixes computed below full precision are reused and counted, are kept apart by level, or
are dropped once precision is full again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphOptions(PolicyOptions):
    """Resolved `--memory-backend` and `--morph-*` flags: the policy's, and these."""

    memory_backend: str = "static"
    """`static` (stock SGLang) or the name of a registered `MemoryBackend`."""
    variants: tuple[str, ...] = ()
    """Variants in the order in which a layer takes them; empty means the device's default."""
    variant_checkpoint: str | None = None
    """Folder of a quantized checkpoint of the same model that one variant comes from; or None."""
    bundle: str | None = None
    """Folder of a morph bundle; `auto`: the cache's, made if missing; None: quantize at start."""
    plan: str | None = None
    """Path of a precision plan; None means a default plan in `order`."""
    levels: tuple[int, ...] = ()
    """Plan steps applied at level 1, 2, ...; empty means the plan's own."""
    order: str = "front"
    """Order of the default plan: `front` (first decoder layer first) or `back`."""
    eviction_quality_price: float = _EVICTION.eviction_quality_price
    eviction_victim_reuse: float = _EVICTION.eviction_victim_reuse
    eviction_dwell_s: float = _EVICTION.eviction_dwell_s
    eviction_min_pressure: float = _EVICTION.eviction_min_pressure
    """See `EvictionParameters`."""
    unit_mib: int | None = None
    """MiB of physical memory that `semi_unified` moves at a time; None: by device."""
    restore_gb_per_s: float | None = None
    """Limit on uploads beside forwards at start, 10^9 bytes a second; None: as the link allows."""
    floor_policy: str = "hold"
    """One of `FLOOR_POLICIES`."""
    prefix_policy: str = "share"
    """One of `PREFIX_POLICIES`."""
    event_log: str | None = None
    """Path of the JSONL event log; None writes none."""
    sample_interval_s: float = 0.25
    """Shortest time between two `signals` rows in the event log."""

    @property
    def is_static(self) -> bool:
        return self.memory_backend == "static"
