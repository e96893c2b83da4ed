"""The variants of a model's layers: what they stand for, and what the kernels read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from memory_backends.base import TensorMap
from sglang_morph.precision.names import NOMINAL_BITS
from sglang_morph.precision.quantizers.layer import (
    AsTheyAre,
    LayerQuantizer,
    LayerWeights,
    Variants,
    variants_for,
)
from sglang_morph.precision.quantizers.statistics import InputStatistics, statistics_of
from sglang_morph.precision.variants.base import DerivedVariant
from sglang_morph.profiling.model import LayeredModel, Weights

SEARCHED_BITS = 4
"""Variants of more bits are rounded to nearest, whatever the quantizer: there is little to gain."""


@dataclass(frozen=True, slots=True)
class MadeVariant:
    """One decoder layer in one variant."""

    layer: int
    name: str
    weights: Weights
    """What it stands for, in the model's dtype: linears `[N, K]`, and norms."""
    tensors: TensorMap | None
    """As a `VariantSource` gives them; None where the server derives them from the full weights."""
    nbytes: int
    """What the server's slab holds of it, without padding."""
    layouts: Mapping[str, str]
    """Linear's path -> `Variant.layout`."""


def quantizer_for(variant: str, wanted: LayerQuantizer) -> LayerQuantizer:
    """`wanted`, or rounding to nearest where that is as good."""
    return wanted if NOMINAL_BITS[variant] <= SEARCHED_BITS else AsTheyAre()


def make_variants(
    model: LayeredModel,
    names: Sequence[str],
    quantizer: LayerQuantizer,
    token_ids: torch.Tensor,
) -> Iterator[MadeVariant]:
    """Every layer in every variant, layer by layer; `model` must be as loaded meanwhile.

    `token_ids` `[B, T]` are what a quantizer that looks at activations calibrates on. Raises
    ValueError, naming layer and linear, for a weight that cannot take a variant.
    """
    hidden = model.embed(token_ids)
    for layer in range(model.num_layers):
        loaded = LayerWeights(model.weights(layer), model.norms(layer), model.biased(layer))
        inputs = None
        if any(quantizer_for(name, quantizer).needs_inputs for name in names):
            hidden, read = model.capture(layer, hidden)
            inputs = statistics_of(read)
        for name in names:
            try:
                yield _make(model, layer, name, quantizer_for(name, quantizer), loaded, inputs)
            except ValueError as error:
                raise ValueError(f"layer {layer}, {name}: {error}") from error


def _make(
    model: LayeredModel,
    layer: int,
    name: str,
    quantizer: LayerQuantizer,
    loaded: LayerWeights,
    inputs: Mapping[str, InputStatistics] | None,
) -> MadeVariant:
    variants = variants_for(name, model.device.type, loaded.linears)
    adapted = quantizer.adapt(loaded, variants, inputs)
    weights = {
        path: weight.to(model.device, model.dtype)
        for path, weight in adapted.rounded(variants).items()
    }
    layouts = {path: variant.layout for path, variant in variants.items()}
    tensors = None if is_derived(variants) else adapted.encoded(variants, loaded)
    parts = _derived_parts(variants, loaded) if tensors is None else tensors.values()
    return MadeVariant(layer, name, weights, tensors, _nbytes(parts), layouts)


def _derived_parts(variants: Variants, loaded: LayerWeights) -> Iterator[torch.Tensor]:
    """Without content."""
    for path, variant in variants.items():
        if isinstance(variant, DerivedVariant):
            rows, columns = loaded.linears[path].shape
            yield from variant.empty_parts(rows, columns, "meta").values()


def is_derived(variants: Variants) -> bool:
    """Whether the server makes them from the full weights by itself."""
    return all(isinstance(variant, DerivedVariant) for variant in variants.values())


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
