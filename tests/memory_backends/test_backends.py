"""What every backend does, under the executor and with real pages and requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memory_backends.base import FULL, TensorMap
from memory_backends.pages import count
from memory_backends.semi_unified import SemiUnifiedBackend
from memory_backends.vmm import MIB
from memory_backends.vmm.host import HostDriver
from tests.memory_backends.vmm.faulty import discard
from tests.sglang_morph.controller.small_system import HalvesToyLayer, SmallSystem, ToyLayer

BASE = 24
HALF = 3
"""Level at which every layer has its first variant."""


class _Failing:
    """Fails once when it is asked to take `fail_on`."""

    fail_on: str | None = None

    def bind(self, variant: str, tensors: TensorMap) -> None:
        if variant == self.fail_on:
            self.fail_on = None
            raise RuntimeError("no luck")
        super().bind(variant, tensors)  # type: ignore[misc]


class FailingLayer(_Failing, ToyLayer): ...


class FailingHalves(_Failing, HalvesToyLayer): ...


@pytest.fixture(params=["layer_swap", "semi_unified"])
def system(request: pytest.FixtureRequest) -> Iterator[SmallSystem]:
    if request.param == "layer_swap":
        yield SmallSystem(BASE, layer_type=FailingLayer)
        return
    driver = HostDriver()
    yield SmallSystem(
        BASE,
        layer_type=FailingHalves,
        backend=SemiUnifiedBackend(2 * MIB, lambda device: driver),
        variants=("half",),
        slab_bytes=6 * MIB,
        dim=512,
    )
    discard(driver)


def finish_restore(system: SmallSystem) -> list[str]:
    """Results that the restore reported on the way."""
    results = []
    while system.executor.restoring:
        outcome = system.advance()
        system.check()
        if outcome is not None:
            results.append(outcome.result)
    return results


def test_there_and_back(system: SmallSystem) -> None:
    assert system.move(system.top_level).result == "completed"
    for token in range(3, 10):
        assert system.admit([token] * 12)
    system.check()
    for req in system.requests[:-2]:
        system.finish(req, insert=False)
    assert system.move(0).pages_migrated > 0
    system.check()
    assert finish_restore(system) == ["completed"]
    assert [layer.variant for layer in system.layers] == [FULL] * 4
    assert system.allocator.size == BASE


def test_a_failed_downshift_leaves_every_weight_as_it_was(system: SmallSystem) -> None:
    system.layers[2].fail_on = "half"
    outcome = system.move(HALF)
    assert outcome.result == "rolled_back"
    assert "no luck" in str(outcome.error)
    assert [layer.variant for layer in system.layers] == [FULL] * 4
    assert system.allocator.size == BASE
    system.check()
    assert system.move(HALF).result == "completed"
    system.check()


def test_a_failed_restore_is_tried_again_and_ends_bit_for_bit(system: SmallSystem) -> None:
    system.move(HALF)
    system.layers[1].fail_on = FULL
    assert system.move(0).result == "started"
    assert finish_restore(system) == ["rolled_back", "completed"]
    assert [layer.variant for layer in system.layers] == [FULL] * 4


def test_an_emergency_during_a_restore_lends_again(system: SmallSystem) -> None:
    executor = system.executor
    system.move(system.top_level)
    system.move(0)
    system.advance()
    assert executor.restoring
    assert system.move(2).pages_lent == count(system.backend.lendable(2))
    system.check()
    while executor.restoring:
        system.advance()
        system.check()
    assert executor.level == 2


def test_a_failed_emergency_does_not_stop_the_restore_under_way(system: SmallSystem) -> None:
    system.move(2)
    system.move(0)
    assert system.executor.restoring
    system.layers[3].fail_on = "half"
    assert system.move(HALF).result == "rolled_back"
    system.check()
    assert finish_restore(system) == ["completed"]
    assert system.executor.level == 0


def test_lending_again_stops_the_uploads_of_a_restore(system: SmallSystem) -> None:
    """They go into memory that belongs to requests again."""
    system.move(HALF)
    system.move(0)
    system.move(HALF)
    for token in range(3, 10):
        assert system.admit([token] * 12)
    system.advance()
    system.check()


def test_a_restore_that_does_not_fit_changes_nothing(system: SmallSystem) -> None:
    system.move(HALF)
    for token in range(3, 8):
        assert system.admit([token] * 10)
    pages = system.allocator.free_pages.clone()
    outcome = system.move(0)
    assert outcome.result == "deferred"
    assert torch.equal(system.allocator.free_pages, pages)
    system.check()


def test_the_growth_reserve_defers_a_restore(system: SmallSystem) -> None:
    system.move(1)
    system.reserve = BASE + 1
    assert system.move(0).result == "deferred"
    system.reserve = BASE
    assert system.move(0).result == "started"


def test_bytes_by_owner_add_up_at_every_level(system: SmallSystem) -> None:
    totals = set()
    for level in range(system.top_level + 1):
        if level:
            system.move(level)
        report = system.backend.report()
        owners = (report.full_weights, report.variant_weights, report.kv_base, report.kv_lent)
        totals.add(sum(owners) + report.unused)
        assert min(*owners, report.unused) >= 0
        assert report.kv_lent == system.allocator.lent_size * system.page_bytes
    assert len(totals) == 1


def test_lent_pages_are_cleared(system: SmallSystem) -> None:
    system.move(1)
    assert system.allocator.lent
    pages = system.backend.kv_storage.view(-1, system.page_bytes)
    for r in system.allocator.lent:
        assert not pages[r.start : r.stop].any()
