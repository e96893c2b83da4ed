"""The variants that plans name, of every layer: what they stand for and how large they are."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_morph.precision.names import FULL
from sglang_morph.profiling.model import LayeredModel, Weights
from sglang_morph.profiling.variants import MadeVariant
from sglang_morph.quality.lowered import LayerVariants


class VariantSet:
    """Keeps the weights that every variant stands for, in the dtype the model computes in."""

    def __init__(self, model: LayeredModel, made: Iterable[MadeVariant]) -> None:
        self._weights: dict[tuple[int, str], Weights] = {}
        self._bytes: dict[tuple[int, str], int] = {}
        for variant in made:
            self._weights[variant.layer, variant.name] = variant.weights
            self._bytes[variant.layer, variant.name] = variant.nbytes
        for layer in range(model.num_layers):
            full = sum(weight.nbytes for weight in model.weights(layer).values())
            self._bytes[layer, FULL] = full

    def weights(self, layer: int, variant: str) -> Weights:
        """Raises KeyError for a variant that was not made."""
        return self._weights[layer, variant]

    def freed_bytes(self, variants: LayerVariants) -> int:
        """What the weights are smaller by than at full precision."""
        return sum(
            self._bytes[layer, FULL] - self._bytes[layer, variant]
            for layer, variant in enumerate(variants)
        )
