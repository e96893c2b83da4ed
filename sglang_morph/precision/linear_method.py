"""The bridge from SGLang's linear layers to a variant's kernel."""

from __future__ import annotations

import torch
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from sglang_morph.precision.variants.base import Parts, Variant


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
