"""int8 and int4 in plain torch, for any device: right, but slower than full precision."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from sglang_morph.precision.quantizers.base import QuantizedWeight
from sglang_morph.precision.variants.base import Parts, QuantizedVariant
from sglang_morph.precision.variants.grouping import (
    INT4_GROUP_SIZES,
    int4_group_size,
    int8_parts,
)


class Int8Torch(QuantizedVariant):
    """One scale and one offset for each output row; the weight is rebuilt at every call."""

    name = "int8"
    parameter_dtype = torch.float32

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


class Int4Torch(QuantizedVariant):
    """Two codes a byte (the even column in the low half), unpacked at every call."""

    name = "int4"
    parameter_dtype = torch.float32

    def supports(self, rows: int, columns: int) -> str | None:
        smallest = INT4_GROUP_SIZES[-1]
        if columns % smallest:
            return f"int4 needs K divisible by {smallest}, not {columns}"
        return None

    def group_size(self, columns: int) -> int:
        return int4_group_size(columns)

    def pack(self, quantized: QuantizedWeight) -> dict[str, torch.Tensor]:
        """`codes` uint8 `[N, K / 2]`, `scales` and `zeros` float32 `[N, K / group]`."""
        codes = quantized.codes
        return {
            "codes": codes[:, 0::2] | (codes[:, 1::2] << 4),
            "scales": quantized.scales,
            "zeros": quantized.zeros,
        }

    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed, scales = parts["codes"], parts["scales"]
        codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)
        group_size = codes.shape[1] // scales.shape[1]
        quantized = QuantizedWeight(codes, scales, parts["zeros"], 4, group_size)
        return linear(x, quantized.dequantize().to(x.dtype), bias)
