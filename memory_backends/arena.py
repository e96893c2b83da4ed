"""The arena: base KV pages and weight slabs in one address range (docs/architecture.md).

    | page 0 | base pages ...          | slab 0          | slab 1          | ... |
    ^ kv_storage: page ids run over the whole range, so a slab's tail *is* a run of page ids

A page id is an address, `page_id * page_bytes`; lending a slab's tail needs no remapping.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memory_backends.base import PageRange
from memory_backends.slab import align


class Arena:
    """Owns the bytes. `base_pages` counts page 0; `slab_bytes` are multiples of the alignment."""

    def __init__(
        self, base_pages: int, page_bytes: int, slab_bytes: Sequence[int], device: torch.device
    ) -> None:
        self.base_pages = base_pages
        self.page_bytes = page_bytes
        self._slabs: list[tuple[int, int]] = []
        end = align(base_pages * page_bytes)
        for nbytes in slab_bytes:
            self._slabs.append((end, end + nbytes))
            end += nbytes
        self.pages = -(-end // page_bytes)
        """Page ids in the range, the last one perhaps only partly covered by a slab."""
        self.storage = torch.zeros(self.pages * page_bytes, dtype=torch.uint8, device=device)

    def slab(self, index: int) -> torch.Tensor:
        """uint8 view of slab `index`."""
        start, stop = self._slabs[index]
        return self.storage[start:stop]

    def tail_pages(self, index: int, head_bytes: int) -> PageRange:
        """Pages lying wholly behind the first `head_bytes` of slab `index` and inside it."""
        start, stop = self._slabs[index]
        first = -(-(start + head_bytes) // self.page_bytes)
        return PageRange(first, max(first, stop // self.page_bytes))
