"""A source of readings for the controller's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_morph.controller.signals import Signals

BASE_PAGES = 1000
PAGES_PER_LEVEL = 500

MakeSignals = Callable[..., Signals]


def make_signals(
    now: float,
    used: int = 0,
    level: int = 0,
    evictable: int = 0,
    waiting: int = 0,
    oldest_wait_s: float = 0.0,
    blocked: bool = False,
    waiting_tokens: int = 0,
    level_pages: tuple[int, ...] = (),
) -> Signals:
    """A reading of a pool of 1000 base pages to which every level lends 500 more."""
    capacity = BASE_PAGES + level * PAGES_PER_LEVEL
    return Signals(
        now=now,
        base_pages=BASE_PAGES,
        capacity_pages=capacity,
        free_pages=capacity - used - evictable,
        evictable_pages=evictable,
        running=8,
        waiting=waiting,
        oldest_wait_s=oldest_wait_s,
        admission_blocked=blocked,
        level=level,
        level_pages=level_pages,
        waiting_tokens=waiting_tokens,
    )


@pytest.fixture(scope="session")
def signals() -> MakeSignals:
    return make_signals
