"""The bridge from SGLang's linear layers to a variant's kernel."""

from __future__ import annotations

from functools import partial

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from sglang_morph.precision.variants.base import Halves, NestedVariant, Parts, Variant


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
    """Full precision from two halves; `method` is what the layer was loaded with.

    Where the variant rebuilds the weight for `method` to use, results are those of `method` bit for
    bit, and the layer's own `weight` is a view of the scratch memory it is rebuilt in.
    """

    def __init__(self, method: LinearMethodBase, variant: NestedVariant, halves: Halves) -> None:
        self._method = method
        self._variant = variant
        self._halves = halves

    def rebuild(self) -> torch.Tensor:
        """The full weight bit for bit, in memory of its own: a forward may be using the scratch."""
        halves = self._halves
        weight = torch.empty(
            halves.residual["lower"].shape, dtype=halves.scratch.dtype, device=halves.scratch.device
        )
        self._variant.rebuild(halves.parts, halves.residual, weight)
        return weight

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        loaded = partial(self._method.apply, layer)
        return self._variant.merged_linear(self._halves, x, bias, loaded)
