"""int3 on the CPU: for plans that go that low. There is no kernel for 3 bits, so it is slow."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from sglang_morph.precision.quantizers.base import QuantizedWeight
from sglang_morph.precision.variants.base import Parts, QuantizedVariant
from sglang_morph.precision.variants.grouping import int4_group_size

_MIDPOINT = 4


class Int3Cpu(QuantizedVariant):
    """Groups as for int4. The weight is rebuilt in scratch memory at every call.

    Parts: `low` uint8 `[N / 4, K]`, the codes' two lower bits, `high` uint8 `[N / 8, K]`, their
    upper bit, and `scales` and `zeros` bfloat16 `[N, K / group]`. A byte holds codes of one column,
    `N / 4` or `N / 8` rows apart, from its least significant bits up: so unpacking runs along rows.
    """

    name = "int3"
    parameter_dtype = torch.bfloat16
    kernel = "torch (dequantized at every call)"

    def supports(self, rows: int, columns: int) -> str | None:
        if rows % 8:
            return f"int3 needs N divisible by 8, not {rows}"
        if columns % 32:
            return f"int3 needs K divisible by 32, not {columns}"
        return None

    def group_size(self, columns: int) -> int:
        return int4_group_size(columns)

    def pack(self, quantized: QuantizedWeight) -> dict[str, torch.Tensor]:
        return {
            "low": _pack(quantized.codes & 3, bits=2),
            "high": _pack(quantized.codes >> 2, bits=1),
            "scales": quantized.scales,
            "zeros": quantized.zeros,
        }

    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, _dequantize(parts).to(x.dtype), bias)


def _pack(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[N, K]`, each below `2**bits`, to `[N * bits / 8, K]`."""
    packed = torch.zeros_like(fields[: fields.shape[0] * bits // 8])
    for position, rows in enumerate(fields.split(len(packed))):
        packed |= rows << (bits * position)
    return packed


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_pack`."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)])


def _dequantize(parts: Parts) -> torch.Tensor:
    """float32 `[N, K]`."""
    codes = _unpack(parts["low"], bits=2)
    codes |= _unpack(parts["high"], bits=1) << 2
    scales = parts["scales"].float().unsqueeze(-1)
    lowest = parts["zeros"].float().unsqueeze(-1) - _MIDPOINT * scales
    grouped = codes.float().view(*parts["scales"].shape, -1)
    return torch.addcmul(lowest, grouped, scales).view(codes.shape)
