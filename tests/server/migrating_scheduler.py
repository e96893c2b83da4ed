"""A scheduler process that moves KV pages at every step while marked requests run."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.scheduler import run_scheduler_process

from memory_backends.base import PageRange
from memory_backends.pages import to_tensor
from patches.apply import install
from patches.registry import SCHEDULER_PATCHES
from sglang_morph.controller.reclaim import migrate
from sglang_morph.controller.scheduler_view import page_tables
from sglang_morph.runtime import MorphRuntime, order_after_forward

MARK = "migrate-"
PAGES_A_STEP = 8


class MigratingRuntime(MorphRuntime):
    """Swaps random used pages for random free ones before every batch is planned."""

    migrated = 0
    _generator = torch.Generator().manual_seed(3)

    def attach(self, scheduler: Any) -> None:
        super().attach(scheduler)
        self._scheduler = scheduler

    def tick(self) -> None:
        super().tick()
        tables = page_tables(self._scheduler)
        if not any(req.rid.startswith(MARK) for req in tables.requests):
            return
        allocator = tables.allocator
        free = torch.cat((allocator.free_pages, allocator.release_pages))
        base = PageRange(1, allocator.base_size + 1)
        existing = to_tensor([base, *allocator.lent], free.device)
        used = existing[~torch.isin(existing, free)]
        number = min(PAGES_A_STEP, len(used), len(free))
        order_after_forward(self._scheduler)
        migrate(self._some(used, number), self._some(free, number), tables)
        self.migrated += number

    def status(self) -> dict[str, Any]:
        return {**super().status(), "migrated_by_test": self.migrated}

    def _some(self, pages: torch.Tensor, number: int) -> torch.Tensor:
        return pages[torch.randperm(len(pages), generator=self._generator)[:number]]


def run_migrating_scheduler_process(server_args: Any, *args: Any, **kwargs: Any) -> None:
    install(MigratingRuntime(server_args.morph), SCHEDULER_PATCHES)
    run_scheduler_process(server_args, *args, **kwargs)
