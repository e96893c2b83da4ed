"""At which precision level each page's KV was computed: one byte a page.

While every page in use comes from level 0 nothing is read or written: `any` says so.
"""

from __future__ import annotations

import torch


class PageLevels:
    """Work is enqueued on the current stream, so calls take effect in their order.

    Invariant: without `any`, every byte is 0. A page keeps its byte when it is freed; whoever
    gets the page next writes it anew.
    """

    def __init__(self, pages: int, device: torch.device | str) -> None:
        self._levels = torch.zeros(pages, dtype=torch.uint8, device=device)
        self._left: HostNumber | None = None
        self.any = False
        """Some page may hold KV that was computed below full precision."""

    def computed(self, pages: torch.Tensor, level: int) -> None:
        """A forward that writes `pages` (ids, any integer type) is launched at `level`."""
        if level:
            self.any, self._left = True, None
        if self.any:
            self._levels.index_fill_(0, pages.long(), level)

    def lowered(self, pages: torch.Tensor) -> torch.Tensor:
        """For each of `pages` (int64 ids), whether its KV was computed below full precision."""
        return self._levels[pages] != 0

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The KV of pages `source` was copied to pages `target`. int64 ids, disjoint sets."""
        if self.any:
            self._levels[target] = self._levels[source]

    def clear(self) -> None:
        """Everything cached is gone, or was computed at full precision."""
        if self.any:
            self._levels.zero_()
        self.any, self._left = False, None

    def settle(self, free: torch.Tensor, existing: int) -> None:
        """Find out, without waiting, whether any page in use is still lowered; if not, `clear`.

        Call it now and then at level 0, where pages `1 .. existing` exist and `free` (int64 ids) of
        them are free. One call asks the device, a later one reads the answer.
        """
        if self._left is None:
            self._levels.index_fill_(0, free, 0)
            self._levels[existing + 1 :] = 0
            self._levels[0] = 0  # page 0 takes what nobody reads
            self._left = HostNumber((self._levels != 0).sum())
        elif self._left.is_there:
            if self._left.value == 0:
                self.clear()
            self._left = None


class HostNumber:
    """An integer tensor of one element on its way to the host."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number = number.to("cpu", non_blocking=True)
        self._copied = None
        if number.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def is_there(self) -> bool:
        return self._copied is None or self._copied.query()

    @property
    def value(self) -> int:
        """Waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._number)
