"""Readings and records for the tests of what is observed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memory_backends.base import MemoryReport
from sglang_morph.controller.outcome import Outcome
from sglang_morph.controller.signals import Signals
from sglang_morph.observability.records import TransitionRecord


@pytest.fixture
def signals() -> Signals:
    """900 of 1000 base pages in use, 500 more lent."""
    return Signals(
        now=10.0,
        base_pages=1000,
        capacity_pages=1500,
        free_pages=550,
        evictable_pages=50,
        running=7,
        waiting=3,
        oldest_wait_s=0.25,
        admission_blocked=True,
        level=1,
    )


@pytest.fixture
def record(signals: Signals) -> TransitionRecord:
    return TransitionRecord(
        revision=4,
        reason="pressure 0.90 >= 0.85 for 0.25 s",
        signals=replace(signals, level=0),
        outcome=Outcome(0, 1, "completed", pages_lent=500, duration_s=0.02),
    )


@pytest.fixture
def report() -> MemoryReport:
    return MemoryReport(
        full_weights=100,
        variant_weights=20,
        kv_base=1000,
        kv_lent=500,
        unused=5,
        host_backup=200,
        host_variants=80,
        detail={"staging": 1},
    )
