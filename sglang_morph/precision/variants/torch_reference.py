"""int8 in plain torch, for any device: right, but slower than full precision."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from sglang_morph.precision.quantizers.base import QuantizedWeight
from sglang_morph.precision.variants.base import Parts, QuantizedVariant
from sglang_morph.precision.variants.grouping import int8_parts


class Int8Torch(QuantizedVariant):
    """One scale and one offset for each output row; the weight is rebuilt at every call."""

    name = "int8"
    parameter_dtype = torch.float32
    kernel = "torch (dequantized at every call)"

    def supports(self, rows: int, columns: int) -> str | None:
        return None

    def group_size(self, columns: int) -> int:
        return columns

    def pack(self, quantized: QuantizedWeight) -> dict[str, torch.Tensor]:
        return int8_parts(quantized)

    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scales, offsets = parts["scales"].unsqueeze(-1), parts["offsets"].unsqueeze(-1)
        weight = torch.addcmul(offsets, parts["codes"].float(), scales)
        return linear(x, weight.to(x.dtype), bias)
