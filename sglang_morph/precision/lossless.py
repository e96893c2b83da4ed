"""The part of a plan for a backend that needs every weight it lowers to be nested."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

from memory_backends.base import MorphableLayer
from sglang_morph.precision.plan import PlanError, PrecisionPlan

logger = logging.getLogger(__name__)


def lossless_part(
    plan: PrecisionPlan, layers: Sequence[MorphableLayer]
) -> tuple[PrecisionPlan, tuple[int, ...]]:
    """`plan` without the layers whose values no nesting can hold, and those layers' indices.

    Raises `PlanError` where none is left.
    """
    kept_full = {s.layer for s in plan.steps if not layers[s.layer].is_lossless(s.variant)}
    if not kept_full:
        return plan, ()
    ordered = tuple(sorted(kept_full))
    logger.warning(
        "Layers %s stay at full precision: their values cannot be nested",
        ", ".join(map(str, ordered)),
    )
    return without_layers(plan, kept_full), ordered


def without_layers(plan: PrecisionPlan, layers: Collection[int]) -> PrecisionPlan:
    """`plan` without the steps of `layers`; levels that then equal the one before fall away.

    Raises `PlanError` where no step is left.
    """
    steps = tuple(step for step in plan.steps if step.layer not in layers)
    if not steps:
        raise PlanError(
            "no decoder layer of this model can be nested: its weights are beyond what fp16 holds; "
            "use --memory-backend layer_swap"
        )
    depths = {sum(step.layer not in layers for step in plan.steps[:depth]) for depth in plan.levels}
    return replace(plan, steps=steps, levels=tuple(sorted(depths)))
