"""Page levels on a CUDA device: ordered by the stream, read without waiting for it."""

from __future__ import annotations

import pytest
import torch

from memory_backends.page_levels import HostNumber, PageLevels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_number_arrives_in_the_order_of_the_stream() -> None:
    levels = PageLevels(100, "cuda")
    pages = torch.arange(1, 40, device="cuda")
    levels.computed(pages[:10].int(), 2)
    lowered = HostNumber(levels.lowered(pages).sum())
    levels.computed(pages, 0)
    assert lowered.value == 10
    assert lowered.is_there
    assert HostNumber(levels.lowered(pages).sum()).value == 0


def test_settling_never_waits_and_comes_to_an_end() -> None:
    levels = PageLevels(100, "cuda")
    levels.computed(torch.tensor([5, 6], device="cuda"), 1)
    levels.move(torch.tensor([7], device="cuda"), torch.tensor([5], device="cuda"))
    free = torch.tensor([p for p in range(1, 51) if p != 7], device="cuda")
    for _ in range(4):
        levels.settle(free, 50)
        torch.cuda.synchronize()
    assert levels.any
    for _ in range(2):
        levels.settle(torch.arange(1, 51, device="cuda"), 50)
        torch.cuda.synchronize()
    assert not levels.any
