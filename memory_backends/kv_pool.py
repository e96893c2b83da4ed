"""The elastic KV pool: SGLang's MHA pool over page-major storage that a backend owns.

A page holds all layers of one token (page size 1): `[layer][K, V][head][dim]`. Each layer's K and
V are 3-D views `(pages, heads, dim)` with the stride of a whole page, which SGLang's attention
backends and its KV store kernel take as they take its own contiguous buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from memory_backends.base import PageRange
from memory_backends.page_levels import PageLevels

STAGING_BYTES = 64 << 20
"""Most memory that a migration takes for its gathered pages."""


class ElasticMHATokenToKVPool(MHATokenToKVPool):
    """`size` is the highest page id that can ever be lent, not what exists now.

    SGLang's store kernel checks ids against it on the device, also inside CUDA graphs. What may be
    handed out is the allocator's business.
    """

    def __init__(
        self, base_size: int, *, storage: torch.Tensor, page_bytes: int, **kwargs: Any
    ) -> None:
        """`storage`: uint8, a whole number of pages of `page_bytes`; `base_size`: tokens, page 0
        not counted. The rest are `MHATokenToKVPool`'s keyword arguments."""
        self.page_bytes = page_bytes
        self._pages = storage.view(-1, page_bytes)
        self._base_bytes = (base_size + 1) * page_bytes
        super().__init__(self._pages.shape[0] - 1, **kwargs)
        self.page_levels = PageLevels(self._pages.shape[0], storage.device)

    def _create_buffers_normal(self) -> None:
        key = self.head_num * self.head_dim
        value = self.head_num * self.v_head_dim
        flat = self._pages.view(-1).view(self.store_dtype)
        stride = self._pages.shape[1] // self.store_dtype.itemsize
        if stride != self.layer_num * (key + value):
            raise ValueError(
                f"a page of {stride} elements is not {self.layer_num} layers of {key} + {value}"
            )

        def view(offset: int, dim: int) -> torch.Tensor:
            shape = (self._pages.shape[0], self.head_num, dim)
            return flat.as_strided(shape, (stride, dim, 1), flat.storage_offset() + offset)

        starts = [layer * (key + value) for layer in range(self.layer_num)]
        self.k_buffer = [view(start, self.head_dim) for start in starts]
        self.v_buffer = [view(start + key, self.v_head_dim) for start in starts]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """What the base pages take; lent pages are the weights' bytes."""
        return self._base_bytes // 2, self._base_bytes - self._base_bytes // 2

    def copy_pages(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy whole pages, all layers at once, on the current stream. int64 ids, disjoint sets."""
        step = max(1, STAGING_BYTES // self._pages.shape[1])
        for start in range(0, len(source), step):
            self._pages[target[start : start + step]] = self._pages[source[start : start + step]]
        self.page_levels.move(target, source)

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        self.copy_pages(tgt_loc, src_loc)

    def zero_pages(self, ranges: Sequence[PageRange]) -> None:
        """Clear pages that held weights, so that no kernel meets a NaN in a slot it masks."""
        for r in ranges:
            self._pages[r.start : r.stop].zero_()


def page_bytes(
    num_layers: int, num_kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of one token's KV over all layers."""
    return num_layers * num_kv_heads * (head_dim + v_head_dim) * dtype.itemsize
