"""The part of a plan that a backend of nested halves can carry out."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_morph.precision.lossless import lossless_part
from sglang_morph.precision.plan import ModelIdentity, PlanError, default_plan

IDENTITY = ModelIdentity("LlamaForCausalLM", 8, 64, 96, 4, 2, 128)
PLAN = default_plan(IDENTITY, ("nested_fp8",))


def layers(*unfit: int) -> list[Any]:
    return [
        SimpleNamespace(index=i, is_lossless=lambda variant, i=i: i not in unfit) for i in range(8)
    ]


def test_a_plan_that_fits_is_untouched(caplog: pytest.LogCaptureFixture) -> None:
    assert PLAN.levels == (0, 2, 4, 8)
    assert lossless_part(PLAN, layers()) == (PLAN, ())
    assert not caplog.records


def test_layers_that_cannot_be_nested_lose_their_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan, kept_full = lossless_part(PLAN, layers(5, 1))
    assert kept_full == (1, 5)
    assert [step.layer for step in plan.steps] == [0, 2, 3, 4, 6, 7]
    assert plan.levels == (0, 1, 3, 6)
    assert plan.layer_variants(1) == ("nested_fp8", *["full"] * 7)
    assert plan.digest != PLAN.digest
    assert "Layers 1, 5 stay at full precision" in caplog.text


def test_levels_without_steps_of_their_own_fall_away() -> None:
    plan, _ = lossless_part(PLAN, layers(0, 1))
    assert plan.levels == (0, 2, 6)


def test_a_model_without_any_such_layer_is_refused() -> None:
    with pytest.raises(PlanError, match="no decoder layer .* use --memory-backend layer_swap"):
        lossless_part(PLAN, layers(*range(8)))
