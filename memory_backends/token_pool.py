"""The elastic allocator: SGLang's token allocator whose capacity follows what is lent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

from memory_backends.base import PageRange
from memory_backends.kv_pool import ElasticMHATokenToKVPool
from memory_backends.pages import count, subtract, to_tensor


class ElasticTokenToKVPoolAllocator(TokenToKVPoolAllocator):
    """Page size 1. `size` is the live capacity, base plus lent, page 0 not counted.

    Page ids `1 .. base_size` always exist; others only between `lend` and `withdraw`. While pages
    are lent the free list is kept ascending, so that base pages are handed out first and a
    reclaim finds little to move.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: ElasticMHATokenToKVPool,
        need_sort: bool,
    ) -> None:
        self.base_size = size
        self._stock_need_sort = need_sort
        self._lent: list[PageRange] = []
        self.free_pages: torch.Tensor
        self.release_pages: torch.Tensor
        super().__init__(size, dtype, device, kvcache, need_sort)

    @property
    def lent(self) -> tuple[PageRange, ...]:
        """Ranges lent now, ascending."""
        return tuple(self._lent)

    @property
    def lent_size(self) -> int:
        """Pages lent now."""
        return count(self._lent)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        # Stock merges only when the sorted part runs out: freed base pages would lie idle.
        if self._lent and len(self.release_pages) > len(self.free_pages) // 16:
            self.merge_and_sort_free()
        return super().alloc(need_size)

    def clear(self) -> None:
        """All pages free: base and lent ones, never those that weights hold."""
        super().clear()  # resets release_pages and the free group; its free list is replaced
        base = torch.arange(1, self.base_size + 1, dtype=torch.int64, device=self.device)
        self.free_pages = torch.cat((base, to_tensor(self._lent, self.device)))

    def lend(self, ranges: Sequence[PageRange]) -> None:
        """Add pages. Raises ValueError if one exists already; then nothing has changed."""
        if any(r.start <= self.base_size for r in ranges):
            raise ValueError("base pages cannot be lent")
        if count(subtract(ranges, self._lent)) != count(ranges):
            raise ValueError("a page is lent already")
        self.free_pages = torch.cat((self.free_pages, to_tensor(ranges, self.device)))
        self._set_lent([*self._lent, *ranges])

    def withdraw(self, ranges: Sequence[PageRange]) -> None:
        """Remove free pages. Raises ValueError if one is used or not lent; then nothing changed."""
        if count(subtract(ranges, self._lent)):
            raise ValueError("a page to withdraw is not lent")
        free = self._all_free()
        kept = free[~self._in_ranges(free, ranges)]
        if len(free) - len(kept) != count(ranges):
            raise ValueError(
                f"{count(ranges) - len(free) + len(kept)} of {count(ranges)} pages to withdraw "
                "are in use"
            )
        self._set_free(kept)
        self._set_lent(subtract(self._lent, ranges))

    def used_in(self, ranges: Sequence[PageRange]) -> torch.Tensor:
        """Ids in `ranges` that are not free, int64, ascending. One look-up on the device."""
        pages = to_tensor(ranges, self.device)
        return pages[~torch.isin(pages, self._all_free())]

    def free_outside(self, ranges: Sequence[PageRange], number: int) -> torch.Tensor:
        """Up to `number` free ids not in `ranges`, lowest first, int64. They stay free."""
        free = self._all_free()
        return free[~self._in_ranges(free, ranges)].sort().values[:number]

    def exchange(self, taken: torch.Tensor, returned: torch.Tensor) -> None:
        """Pages `taken` leave the free list and pages `returned` enter it, in one step."""
        free = self._all_free()
        kept = free[~torch.isin(free, taken)]
        if len(free) - len(kept) != len(taken):
            raise ValueError("a page to take is not free")
        self._set_free(torch.cat((kept, returned)))

    def _all_free(self) -> torch.Tensor:
        if not self.is_not_in_free_group:
            raise RuntimeError("pages are being freed in a group; close it first")
        return torch.cat((self.free_pages, self.release_pages))

    def _set_free(self, pages: torch.Tensor) -> None:
        self.free_pages = pages.sort().values
        self.release_pages = self.release_pages[:0]

    def _set_lent(self, ranges: Sequence[PageRange]) -> None:
        self._lent = sorted(ranges, key=lambda r: r.start)
        self.size = self.base_size + self.lent_size
        self.merge_and_sort_free()  # stock's order leaves release_pages unread
        self.need_sort = self._stock_need_sort or bool(self._lent)

    @staticmethod
    def _in_ranges(pages: torch.Tensor, ranges: Sequence[PageRange]) -> torch.Tensor:
        inside = torch.zeros_like(pages, dtype=torch.bool)
        for r in ranges:
            inside |= (pages >= r.start) & (pages < r.stop)
        return inside
