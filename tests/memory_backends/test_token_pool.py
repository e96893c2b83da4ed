from __future__ import annotations

import pytest
import torch

from memory_backends.base import PageRange
from tests.sglang_morph.controller.small_system import SmallSystem


@pytest.fixture
def system() -> SmallSystem:
    return SmallSystem()


def lendable(system: SmallSystem) -> list[PageRange]:
    return system.backend.lendable(1)


def test_capacity_is_live(system: SmallSystem) -> None:
    allocator, pages = system.allocator, lendable(system)
    number = sum(len(r) for r in pages)
    allocator.lend(pages)
    assert allocator.size == allocator.available_size() == 24 + number
    allocator.withdraw(pages)
    assert allocator.size == allocator.available_size() == 24


def test_base_pages_go_first_while_pages_are_lent(system: SmallSystem) -> None:
    allocator = system.allocator
    held = allocator.alloc(10)
    allocator.lend(lendable(system))
    allocator.free(held)
    lent = allocator.alloc(allocator.available_size())
    assert lent.tolist() == sorted(lent.tolist())


def test_clear_never_hands_out_pages_of_weights(system: SmallSystem) -> None:
    allocator, pages = system.allocator, lendable(system)
    allocator.lend(pages)
    allocator.alloc(30)
    allocator.clear()
    existing = set(range(1, 25)) | {i for r in pages for i in range(r.start, r.stop)}
    assert set(allocator.alloc(allocator.size).tolist()) == existing


def test_a_used_page_cannot_be_withdrawn(system: SmallSystem) -> None:
    allocator, pages = system.allocator, lendable(system)
    allocator.lend(pages)
    allocator.alloc(25)
    before = allocator.free_pages.clone()
    with pytest.raises(ValueError, match=r"1 of .* in use"):
        allocator.withdraw(pages)
    assert torch.equal(allocator.free_pages, before)


@pytest.mark.parametrize("again", ["lent", "base"])
def test_a_page_cannot_be_added_twice(system: SmallSystem, again: str) -> None:
    pages = lendable(system)
    system.allocator.lend(pages)
    with pytest.raises(ValueError):
        system.allocator.lend(pages if again == "lent" else [PageRange(3, 4)])
    assert system.allocator.available_size() == system.allocator.size


def test_pages_in_an_open_free_group_stop_a_reclaim(system: SmallSystem) -> None:
    allocator = system.allocator
    allocator.lend(lendable(system))
    allocator.free_group_begin()
    with pytest.raises(RuntimeError, match="close it first"):
        allocator.used_in(lendable(system))
    allocator.free_group_end()


def test_freed_base_pages_are_used_again_before_lent_ones(system: SmallSystem) -> None:
    allocator = system.allocator
    allocator.lend(system.backend.lendable(4))
    held = allocator.alloc(20)
    for _ in range(10):
        allocator.free(held[:5])
        held = torch.cat((held[5:], allocator.alloc(5)))
    assert int(held.max()) <= allocator.base_size
