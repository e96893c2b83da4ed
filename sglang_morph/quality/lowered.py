"""A model at a precision level: each layer computed with its variant's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_morph.precision.names import FULL, FUSED, MORPHABLE_LINEARS, NORMS
from sglang_morph.precision.variants.fp8 import quantize_rows
from sglang_morph.profiling.model import LayeredModel, Weights

LayerVariants = Sequence[str]
"""Each layer's variant, by layer index, as `PrecisionPlan.layer_variants` gives them."""

WeightSource = Callable[[int, str], Weights]
"""(layer, variant) -> the weights that the variant stands for."""

FP8_ACTIVATIONS = frozenset({"fp8", "nested_fp8"})
"""Variants whose GPU kernels also round what comes in: to E4M3, with one scale for each token."""


class LoweredModel:
    """Brings a `LayeredModel` from one assignment of variants to another, layer by layer.

    It must be the only one that exchanges the model's weights.
    """

    def __init__(self, model: LayeredModel, weights: WeightSource) -> None:
        self.model = model
        self.variants: tuple[str, ...] = (FULL,) * model.num_layers
        self._weights = weights
        self._hooks: dict[int, list[Any]] = {}

    @property
    def full(self) -> tuple[str, ...]:
        """The assignment of level 0."""
        return (FULL,) * self.model.num_layers

    def lower(self, variants: LayerVariants) -> None:
        """Touches only the layers that change."""
        for layer, (before, after) in enumerate(zip(self.variants, variants, strict=True)):
            if before != after:
                self._lower_layer(layer, after)
        self.variants = tuple(variants)

    def _lower_layer(self, layer: int, variant: str) -> None:
        if variant == FULL:
            self.model.unswap(layer)
        else:
            self.model.swap(layer, self._weights(layer, variant))
        for hook in self._hooks.pop(layer, []):
            hook.remove()
        if variant in FP8_ACTIVATIONS:
            self._hooks[layer] = _round_activations(self.model.hf.model.layers[layer])


def _round_activations(layer: torch.nn.Module) -> list[Any]:
    """Hooks that round what every linear reads. What a norm yields goes to linears only."""
    hooks: list[Any] = []
    for path in MORPHABLE_LINEARS:
        if path in NORMS:
            norm = layer.get_submodule(NORMS[path])
            hooks.append(norm.register_forward_hook(lambda _module, _inputs, y: _rounded(y)))
        else:
            linear = layer.get_submodule(FUSED.get(path, (path,))[0])
            hooks.append(linear.register_forward_pre_hook(lambda _module, xs: _rounded(xs[0])))
    return hooks


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Quantized to E4M3 token by token, and back; `[..., K]`."""
    codes, scales = quantize_rows(x)
    return (codes.float() * scales.unsqueeze(-1)).to(x.dtype)
