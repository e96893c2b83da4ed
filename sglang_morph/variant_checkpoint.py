"""`--morph-variant-checkpoint`: a quantized checkpoint of the served model, opened and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sglang_morph.precision.plan import PrecisionPlan
from sglang_morph.precision.sources import SourceError
from sglang_morph.refusals import MorphRefusal

if TYPE_CHECKING:
    import torch

    from sglang_morph.precision.checkpoints.source import CheckpointSource


def open_checkpoint(
    folder: str,
    plan: PrecisionPlan,
    shapes: Mapping[str, tuple[int, int]],
    device_type: str,
    dtype: torch.dtype,
) -> CheckpointSource:
    """A source for the layers that `plan` lowers to the checkpoint's variant. Reads headers only.

    `shapes`: morphable linear's path -> rows and columns; `dtype` is that of the activations.
    Raises `MorphRefusal`, naming the layer, where the checkpoint does not fit model or kernels.
    """
    from sglang_morph.precision.checkpoints.source import CheckpointSource

    try:
        source = CheckpointSource(folder, device_type, dtype)
        layers = [step.layer for step in plan.steps if step.variant == source.variant]
        if not layers:
            raise SourceError(
                f"{folder} holds {source.variant}, and the plan has only "
                f"{', '.join(plan.variants) or 'full precision'}; name {source.variant} among "
                "--morph-variants, or take a plan that has it"
            )
        source.check(plan.model, layers, shapes)
    except SourceError as error:
        raise MorphRefusal(f"--morph-variant-checkpoint: {error}") from error
    return source
