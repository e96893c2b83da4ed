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
from dataclasses import replace

import torch

from memory_backends.base import BackendError, MemoryBackend, MemoryReport, PageRange
from memory_backends.kv_pool import ElasticMHATokenToKVPool
from memory_backends.pages import count, subtract
from memory_backends.token_pool import ElasticTokenToKVPoolAllocator
from sglang_morph.controller.commands import Command, Readiness
from sglang_morph.controller.outcome import Outcome
from sglang_morph.controller.reclaim import DoesNotFit, PageTables, reclaim
from sglang_morph.precision.plan import PrecisionPlan


class Executor:
    """One per scheduler, and it acts on commands only: nothing here changes capacity by itself.

    `publish(pages)` tells SGLang the live capacity; `order()` puts the device work that follows
    behind the forward in flight (the next forward waits for it anyway). `tables()` and `reserve()`,
    the pages that admitted requests will still grow by, are read when pages are withdrawn.
    """

    def __init__(
        self,
        backend: MemoryBackend,
        plan: PrecisionPlan,
        allocator: ElasticTokenToKVPoolAllocator,
        pool: ElasticMHATokenToKVPool,
        publish: Callable[[int], None],
        order: Callable[[], None],
        tables: Callable[[], PageTables],
        reserve: Callable[[], int],
    ) -> None:
        self._backend = backend
        self._levels = plan.levels
        self._allocator = allocator
        self._pool = pool
        self._publish = publish
        self._order = order
        self._tables = tables
        self._reserve = reserve
        self._lent_depth = backend.depth
        self._restore_began = 0.0
        self._restore_source = 0
        self._revision = 0
        """Of the last command that changed which pages exist."""

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

    def report(self) -> MemoryReport:
        """Bytes by owner. Pages withdrawn whose weights are not back yet belong to nobody.

        The backend goes by its weights and would call them lent until the restore has ended.
        """
        report = self._backend.report()
        lent = self._allocator.lent_size * self._pool.page_bytes
        withheld = report.kv_lent - lent
        return replace(report, kv_lent=lent, unused=report.unused + withheld)

    def readiness(self, rank: int = 0) -> Readiness | None:
        """What this rank says of the next `commit`; None unless a restore is under way."""
        if not self.restoring:
            return None
        level = self._next_level
        return Readiness(rank, self._revision, level, self._backend.ready(self._levels[level]))

    def execute(self, command: Command) -> Outcome | None:
        """Carry out `command`; None for a `commit` after which the restore still goes on.

        Raises ValueError for a command that does not fit the state: it was decided on another one.
        """
        target = command.target
        if command.kind == "commit" and self.restoring and target == self._next_level:
            return self._commit(target)
        if command.kind == "lower" and target > self.target_level:
            outcome = self._lower(target)
        elif command.kind == "withdraw" and target < self.target_level:
            outcome = self._withdraw(target)
        else:
            raise ValueError(
                f"{command} does not fit level {self.level} on the way to {self.target_level}"
            )
        if outcome.result in ("started", "completed"):
            self._revision = command.revision
        return outcome

    @property
    def _next_level(self) -> int:
        """Where the restore under way stops next."""
        return max(k for k, depth in enumerate(self._levels) if depth < self._backend.depth)

    def _commit(self, level: int) -> Outcome | None:
        source, target = self._restore_source, self.target_level
        try:
            self._order()
            self._backend.restore(self._levels[level])
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
            pages_lent=count(pages),
            duration_s=time.perf_counter() - began,
        )

    def _withdraw(self, target: int) -> Outcome:
        began, source, depth = time.perf_counter(), self.level, self._levels[target]
        pages = subtract(self._allocator.lent, self._backend.lendable(depth))
        try:
            self._order()
            done = reclaim(pages, self._tables(), self._reserve())
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
            pages_withdrawn=done.withdrawn,
            pages_migrated=done.migrated,
            pages_evicted=done.evicted,
            duration_s=time.perf_counter() - began,
        )
