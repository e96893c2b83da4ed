"""Arithmetic on sets of KV page ids, kept as ascending, disjoint ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from memory_backends.base import PageRange


def count(ranges: Iterable[PageRange]) -> int:
    """Number of pages in `ranges`."""
    return sum(len(r) for r in ranges)


def subtract(left: Sequence[PageRange], right: Sequence[PageRange]) -> list[PageRange]:
    """Pages of `left` that are not in `right`. Both ascending and disjoint."""
    result: list[PageRange] = []
    for whole in left:
        start = whole.start
        for hole in right:
            if hole.stop <= start or hole.start >= whole.stop:
                continue
            if hole.start > start:
                result.append(PageRange(start, hole.start))
            start = max(start, hole.stop)
        if start < whole.stop:
            result.append(PageRange(start, whole.stop))
    return result


def to_tensor(ranges: Sequence[PageRange], device: torch.device | str) -> torch.Tensor:
    """The page ids, int64, in the order of `ranges`."""
    if not ranges:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat(
        [torch.arange(r.start, r.stop, dtype=torch.int64, device=device) for r in ranges]
    )
