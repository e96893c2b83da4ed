"""What the controller sees of the scheduler in one tick. Plain numbers: no torch, no SGLang."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signals:
    """One reading of the scheduler. Pages equal tokens at page size 1."""

    now: float
    """Monotonic seconds."""
    base_pages: int
    """KV pages that always exist (page 0 not counted)."""
    capacity_pages: int
    """KV pages that exist now: base plus lent."""
    free_pages: int
    evictable_pages: int
    """Cached prefix pages no request holds."""
    running: int
    """Requests in the decode batch."""
    waiting: int
    """Requests in the waiting queue."""
    oldest_wait_s: float
    """Age of the request at the head of the queue, seconds; 0 when none waits."""
    admission_blocked: bool
    """A request waits and SGLang found no room for it."""
    level: int
    """Precision level now (index into the plan's levels)."""
    level_pages: tuple[int, ...] = ()
    """`capacity_pages` at every level, from 0 on; empty where it is not known."""
    waiting_tokens: int = 0
    """Prompt tokens that waiting requests still have to be given pages for."""
    arrived_tokens_total: int = 0
    """Prompt tokens of all requests received since the start."""
    served_tokens_total: int = 0
    """Prompt tokens of all requests that left the waiting queue for good since the start."""
    retractions_total: int = 0
    """Running requests that SGLang put back into the queue since the start."""
    ttft_s: float = 0.0
    """Time to first token at the monitor's percentile, seconds; 0 while none is known."""
    tpot_s: float = 0.0
    """Time per output token after the first, likewise."""

    @property
    def used_pages(self) -> int:
        """Pages some request holds: neither free nor merely cached."""
        return self.capacity_pages - self.free_pages - self.evictable_pages

    @property
    def pressure(self) -> float:
        """`used_pages` over *base* pages: comparable across levels, above 1 only while lent."""
        return self.used_pages / self.base_pages

    @property
    def demand(self) -> float:
        """Pages used and pages waited for, over base pages. Unlike `pressure` it has no ceiling."""
        return (self.used_pages + self.waiting_tokens) / self.base_pages

    def is_blocked(self, delay_s: float) -> bool:
        """Whether the request at the head of the queue finds no room and has waited `delay_s`."""
        return self.admission_blocked and self.oldest_wait_s >= delay_s

    def fits_base(self, share: float) -> bool:
        """Whether what is used and what waits fits `share` of the base pages.

        A request that waits for the next step only, as under a steady load some always do, is none
        that is kept waiting.
        """
        return self.demand <= share and not self.admission_blocked
