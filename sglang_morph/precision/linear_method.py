"""The bridge from SGLang's linear layers to a variant's kernel."""

from __future__ import annotations

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from sglang_morph.precision.variants.base import NestedVariant, Parts, Variant


class VariantLinearMethod(LinearMethodBase):
    """Computes a linear with `variant` over `parts`; the layer's own `weight` is not read.

    It replaces the `quant_method` of a layer that has been loaded, so it creates no weights.
    """

    def __init__(self, variant: Variant, parts: Parts) -> None:
        self.variant = variant
        self.parts = parts

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.variant.linear(self.parts, x, bias)


class MergedLinearMethod(LinearMethodBase):
    """Full precision from two halves: the weight is rebuilt at every call, for `method` to use.

    So results are those of `method`, which the layer was loaded with, bit for bit. `weight` is
    scratch memory, also of other layers, and the layer's own `weight` is a view of it.
    """

    def __init__(
        self,
        method: LinearMethodBase,
        variant: NestedVariant,
        parts: Parts,
        residual: Parts,
        weight: torch.Tensor,
    ) -> None:
        self._method = method
        self._variant = variant
        self._parts = parts
        self._residual = residual
        self._weight = weight

    def rebuild(self) -> torch.Tensor:
        """The full weight, valid until the next merge."""
        self._variant.rebuild(self._parts, self._residual, self._weight)
        return self._weight

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.rebuild()
        y: torch.Tensor = self._method.apply(layer, x, bias)
        return y
