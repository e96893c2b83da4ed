"""The executor: carries out level changes, and keeps weights, pages and capacity in step.

Two numbers are the whole state. `backend.depth` is how many plan steps the weights are in.
`lent_depth` is the depth whose tails the KV pool holds; it never exceeds `backend.depth`, because
pages are lent after their layer shrank and withdrawn before it grows. They differ only while a
restore is bringing layers back, one level at a scheduler step: between levels there is no CUDA
graph to decode with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from memory_backends.base import BackendError, MemoryBackend, PageRange
from memory_backends.kv_pool import ElasticMHATokenToKVPool
from memory_backends.pages import count, subtract
from memory_backends.token_pool import ElasticTokenToKVPoolAllocator
from sglang_morph.controller.monitor import TransitionResult
from sglang_morph.controller.reclaim import DoesNotFit, PageTables, held_pages, reclaim
from sglang_morph.precision.plan import PrecisionPlan


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a transition went; `started` means that a restore is under way."""

    source: int
    target: int
    result: TransitionResult
    lent: int = 0
    withdrawn: int = 0
    migrated: int = 0
    evicted: int = 0
    duration_s: float = 0.0
    error: str | None = None


class Executor:
    """One per scheduler. `publish(pages)` tells SGLang the live capacity; `order()` puts the device
    work that follows behind the forward in flight (the next forward waits for it anyway)."""

    def __init__(
        self,
        backend: MemoryBackend,
        plan: PrecisionPlan,
        allocator: ElasticTokenToKVPoolAllocator,
        pool: ElasticMHATokenToKVPool,
        publish: Callable[[int], None],
        order: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._levels = plan.levels
        self._allocator = allocator
        self._pool = pool
        self._publish = publish
        self._order = order
        self._lent_depth = backend.depth
        self._restore_began = 0.0
        self._restore_source = 0

    @property
    def level(self) -> int:
        """The lowest level that covers every step applied; while restoring, the level left."""
        return next(k for k, depth in enumerate(self._levels) if depth >= self._backend.depth)

    @property
    def restoring(self) -> bool:
        return self._lent_depth != self._backend.depth

    @property
    def target_level(self) -> int:
        """Where the weights are going; equals `level` unless a restore is under way."""
        return self._levels.index(self._lent_depth)

    @property
    def level_pages(self) -> tuple[int, ...]:
        """Capacity at every level: base pages, page 0 not counted, and those lent there."""
        base = self._allocator.base_size
        return tuple(base + count(self._backend.lendable(depth)) for depth in self._levels)

    def gain(self, level: int) -> int:
        """Pages that moving up to `level` would add to the KV pool now."""
        return count(self._to_lend(self._levels[level]))

    def move(
        self, target: int, tables: Callable[[], PageTables], reserve: Callable[[], int]
    ) -> Outcome:
        """Go to level `target`. `reserve`: pages that admitted requests will still grow by.

        Both are called only for a restore.
        """
        if target > self.target_level:
            return self._lower(target)
        return self._start_restore(target, tables(), reserve())

    def advance(self) -> Outcome | None:
        """Bring back one level's layers, if a restore is under way and their weights are at hand.

        The outcome once it has ended or failed, else None.
        """
        next_depth = max((d for d in self._levels if d < self._backend.depth), default=0)
        if not self.restoring or not self._backend.ready(next_depth):
            return None
        source, target = self._restore_source, self.target_level
        try:
            self._order()
            self._backend.restore(next_depth)
        except BackendError as error:
            # The pages stay withdrawn; the next step tries again from the same depth.
            return Outcome(source, target, "rolled_back", error=str(error))
        if self._backend.depth > self._lent_depth:
            return None
        return Outcome(
            source, target, "completed", duration_s=time.perf_counter() - self._restore_began
        )

    def _to_lend(self, depth: int) -> list[PageRange]:
        return subtract(self._backend.lendable(depth), self._allocator.lent)

    def _lower(self, target: int) -> Outcome:
        began, source, depth = time.perf_counter(), self.level, self._levels[target]
        try:
            self._order()
            if depth > self._backend.depth:
                self._backend.lower(depth)
            else:
                # A restore under way stops short: its uploads must not reach tails lent again.
                self._backend.prepare(depth)
        except BackendError as error:
            if self.restoring:
                # lower() dropped the uploads of the restore under way.
                self._backend.prepare(self._lent_depth)
            return Outcome(source, target, "rolled_back", error=str(error))
        pages = self._to_lend(depth)
        self._pool.zero_pages(pages)
        self._allocator.lend(pages)
        self._lent_depth = depth
        self._publish(self._allocator.size)
        return Outcome(
            source,
            target,
            "completed",
            lent=count(pages),
            duration_s=time.perf_counter() - began,
        )

    def _start_restore(self, target: int, tables: PageTables, reserve: int) -> Outcome:
        began, source, depth = time.perf_counter(), self.level, self._levels[target]
        pages = subtract(self._allocator.lent, self._backend.lendable(depth))
        if held_pages(tables) + reserve > self._allocator.size - count(pages):
            return Outcome(source, target, "deferred", error="requests in flight would not fit")
        try:
            self._order()
            done = reclaim(pages, tables)
        except (DoesNotFit, torch.OutOfMemoryError) as error:
            return Outcome(source, target, "deferred", error=str(error).partition("\n")[0])
        self._lent_depth = depth
        self._restore_began, self._restore_source = began, source
        self._publish(self._allocator.size)
        self._backend.prepare(depth)
        return Outcome(
            source,
            target,
            "started",
            withdrawn=done.withdrawn,
            migrated=done.migrated,
            evicted=done.evicted,
            duration_s=time.perf_counter() - began,
        )
