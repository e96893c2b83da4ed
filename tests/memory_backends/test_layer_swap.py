from __future__ import annotations

import pytest
import torch

from memory_backends.base import FULL, BackendError, PageRange, TensorMap
from tests.sglang_morph.controller.small_system import (
    PAGE_BYTES,
    NestedToyLayer,
    SmallSystem,
    ToyLayer,
)


class FailingLayer(ToyLayer):
    """Fails once when it is asked to take `fail_on`."""

    fail_on: str | None = None

    def bind(self, variant: str, tensors: TensorMap) -> None:
        if variant == self.fail_on:
            self.fail_on = None
            raise RuntimeError("no luck")
        super().bind(variant, tensors)


@pytest.fixture
def system() -> SmallSystem:
    return SmallSystem(layer_type=FailingLayer)


def test_a_failed_downshift_leaves_every_weight_as_it_was(system: SmallSystem) -> None:
    system.layers[2].fail_on = "half"
    outcome = system.executor.move(3, system.tables, lambda: 0)
    assert outcome.result == "rolled_back"
    assert "no luck" in str(outcome.error)
    assert [layer.variant for layer in system.layers] == [FULL] * 4
    assert system.allocator.size == 24
    system.check()
    assert system.executor.move(3, system.tables, lambda: 0).result == "completed"
    system.check()


def test_a_failed_second_step_goes_back_to_the_first_variant(system: SmallSystem) -> None:
    system.executor.move(3, system.tables, lambda: 0)
    system.layers[3].fail_on = "quarter"
    assert system.executor.move(4, system.tables, lambda: 0).result == "rolled_back"
    assert {layer.variant for layer in system.layers} == {"half"}
    system.check()


def test_a_failed_restore_is_tried_again_and_ends_bit_for_bit(system: SmallSystem) -> None:
    system.executor.move(3, system.tables, lambda: 0)
    system.layers[1].fail_on = FULL
    assert system.executor.move(0, system.tables, lambda: 0).result == "started"
    results = []
    while system.executor.restoring:
        outcome = system.executor.advance()
        system.check()
        if outcome is not None:
            results.append(outcome.result)
    assert results == ["rolled_back", "completed"]
    assert [layer.variant for layer in system.layers] == [FULL] * 4


def test_an_emergency_during_a_restore_lends_again(system: SmallSystem) -> None:
    executor = system.executor
    executor.move(4, system.tables, lambda: 0)
    executor.move(0, system.tables, lambda: 0)
    executor.advance()
    assert executor.restoring
    assert executor.move(2, system.tables, lambda: 0).lent == executor_pages(system, 2)
    system.check()
    while executor.restoring:
        executor.advance()
        system.check()
    assert executor.level == 2


def executor_pages(system: SmallSystem, depth: int) -> int:
    return sum(len(r) for r in system.backend.lendable(depth))


def test_a_restore_that_does_not_fit_changes_nothing(system: SmallSystem) -> None:
    system.executor.move(3, system.tables, lambda: 0)
    for token in range(3, 8):
        assert system.admit([token] * 10)
    pages = system.allocator.free_pages.clone()
    outcome = system.executor.move(0, system.tables, lambda: 0)
    assert outcome.result == "deferred"
    assert torch.equal(system.allocator.free_pages, pages)
    system.check()


def test_the_growth_reserve_defers_a_restore(system: SmallSystem) -> None:
    system.executor.move(1, system.tables, lambda: 0)
    assert system.executor.move(0, system.tables, lambda: 25).result == "deferred"
    assert system.executor.move(0, system.tables, lambda: 24).result == "started"


def test_bytes_by_owner_add_up_to_the_arena(system: SmallSystem) -> None:
    for level in (0, 2, 4):
        if level:
            system.executor.move(level, system.tables, lambda: 0)
        report = system.backend.report()
        owners = (report.full_weights, report.variant_weights, report.kv_base, report.kv_lent)
        assert sum(owners) + report.unused == system.backend.kv_storage.nbytes
        assert report.kv_lent == system.allocator.lent_size * PAGE_BYTES


def test_a_step_that_frees_nothing_is_refused() -> None:
    class Growing(ToyLayer):
        def variant_tensors(self, variant: str, full: TensorMap) -> TensorMap:
            return {"codes": torch.zeros(4000, dtype=torch.uint8)}

    with pytest.raises(BackendError, match="no smaller in half than in full"):
        SmallSystem(layer_type=Growing)


def test_lent_pages_are_cleared(system: SmallSystem) -> None:
    system.executor.move(1, system.tables, lambda: 0)
    for r in system.allocator.lent:
        assert isinstance(r, PageRange)
        raw = system.backend.kv_storage.view(-1, PAGE_BYTES)[r.start : r.stop]
        assert not raw.any()


def test_a_lossless_variant_needs_only_its_residual_on_the_host() -> None:
    system = SmallSystem(layer_type=NestedToyLayer)
    full = sum(len(layer.original) for layer in system.layers)
    assert full / 2 <= system.backend.report().host_backup < full
    system.executor.move(3, system.tables, lambda: 0)
    system.check()
    system.executor.move(0, system.tables, lambda: 0)
    while system.executor.restoring:
        system.executor.advance()
    system.check()


def test_lending_again_stops_the_uploads_of_a_restore() -> None:
    """They go into the tails, which belong to requests again."""
    system = SmallSystem(layer_type=NestedToyLayer)
    system.executor.move(3, system.tables, lambda: 0)
    system.executor.move(0, system.tables, lambda: 0)
    system.executor.move(3, system.tables, lambda: 0)
    for token in range(3, 10):
        assert system.admit([token] * 12)
    system.executor.advance()
    system.check()


class FragileNestedLayer(NestedToyLayer):
    """Fails once in `derive` or `rebuild`."""

    fail_in: str | None = None

    def _fail(self, where: str) -> None:
        if self.fail_in == where:
            self.fail_in = None
            raise RuntimeError("no luck")

    def derive(self, variant: str, full: TensorMap, out: TensorMap) -> None:
        self._fail("derive")
        super().derive(variant, full, out)

    def rebuild(
        self, variant: str, tensors: TensorMap, residual: TensorMap, out: TensorMap
    ) -> None:
        out["weight"][: len(out["weight"]) // 2] = 0
        self._fail("rebuild")
        super().rebuild(variant, tensors, residual, out)


def test_a_failed_rebuild_keeps_the_lower_precision_and_is_tried_again() -> None:
    system = SmallSystem(layer_type=FragileNestedLayer)
    system.executor.move(3, system.tables, lambda: 0)
    system.layers[2].fail_in = "rebuild"
    system.executor.move(0, system.tables, lambda: 0)
    results = []
    while system.executor.restoring:
        outcome = system.executor.advance()
        system.check()
        results.append(outcome.result if outcome else None)
    assert "rolled_back" in results
    assert results[-1] == "completed"


def test_a_failed_emergency_does_not_stop_the_restore_under_way() -> None:
    system = SmallSystem(layer_type=FragileNestedLayer)
    system.executor.move(2, system.tables, lambda: 0)
    system.executor.move(0, system.tables, lambda: 0)
    assert system.executor.restoring
    system.layers[3].fail_in = "derive"
    assert system.executor.move(3, system.tables, lambda: 0).result == "rolled_back"
    for _ in range(10):
        system.executor.advance()
        system.check()
    assert not system.executor.restoring
    assert system.executor.level == 0
