from __future__ import annotations

import pytest
import torch

from memory_backends.base import BackendError, TensorMap
from tests.memory_backends.test_backends import FailingLayer
from tests.sglang_morph.controller.small_system import (
    PAGE_BYTES,
    NestedToyLayer,
    SmallSystem,
    ToyLayer,
)


@pytest.fixture
def system() -> SmallSystem:
    return SmallSystem(layer_type=FailingLayer)


def test_a_failed_second_step_goes_back_to_the_first_variant(system: SmallSystem) -> None:
    system.move(3)
    system.layers[3].fail_on = "quarter"
    assert system.move(4).result == "rolled_back"
    assert {layer.variant for layer in system.layers} == {"half"}
    system.check()


def test_bytes_by_owner_add_up_to_the_arena(system: SmallSystem) -> None:
    for level in (0, 2, 4):
        if level:
            system.move(level)
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


def test_a_lossless_variant_needs_only_its_residual_on_the_host() -> None:
    system = SmallSystem(layer_type=NestedToyLayer)
    full = sum(len(layer.original) for layer in system.layers)
    assert full / 2 <= system.backend.report().host_backup < full
    system.move(3)
    system.check()
    system.move(0)
    while system.executor.restoring:
        system.advance()
    system.check()


def test_lending_again_stops_the_uploads_of_a_restore() -> None:
    """They go into the tails, which belong to requests again."""
    system = SmallSystem(layer_type=NestedToyLayer)
    system.move(3)
    system.move(0)
    system.move(3)
    for token in range(3, 10):
        assert system.admit([token] * 12)
    system.advance()
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
        self,
        variant: str,
        tensors: TensorMap,
        residual: TensorMap,
        out: TensorMap,
        spare: torch.Tensor,
    ) -> None:
        if self.fail_in == "rebuild":
            out["weight"].zero_()  # with what is left of the residual
        self._fail("rebuild")
        super().rebuild(variant, tensors, residual, out, spare)


def test_a_failed_rebuild_keeps_the_lower_precision_and_is_tried_again() -> None:
    system = SmallSystem(layer_type=FragileNestedLayer)
    system.move(3)
    system.layers[2].fail_in = "rebuild"
    system.move(0)
    results = []
    while system.executor.restoring:
        outcome = system.advance()
        system.check()
        results.append(outcome.result if outcome else None)
    assert "rolled_back" in results
    assert results[-1] == "completed"


def test_a_failed_emergency_does_not_stop_the_restore_under_way() -> None:
    system = SmallSystem(layer_type=FragileNestedLayer)
    system.move(2)
    system.move(0)
    assert system.executor.restoring
    system.layers[3].fail_in = "derive"
    assert system.move(3).result == "rolled_back"
    for _ in range(10):
        system.advance()
        system.check()
    assert not system.executor.restoring
    assert system.executor.level == 0
