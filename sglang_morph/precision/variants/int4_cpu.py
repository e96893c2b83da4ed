"""int4 on the CPU: torch's weight-only int4 kernel."""

from __future__ import annotations

import torch

from sglang_morph.precision.quantizers.base import QuantizedWeight
from sglang_morph.precision.quantizers.integer_zeros import IntegerZeros
from sglang_morph.precision.variants.base import (
    IntegerZerosVariant,
    Parts,
    QuantizedVariant,
    finish,
    rows_of,
)
from sglang_morph.precision.variants.grouping import int4_group_size


class Int4Cpu(QuantizedVariant, IntegerZerosVariant):
    """Groups along K with a scale and a zero each; the kernel's zero is that of code 8, as ours.

    How codes are packed depends on the vector width of the CPU that packs them.
    """

    name = "int4"
    parameter_dtype = torch.bfloat16
    kernel = "torch._weight_int4pack_mm_for_cpu"
    integer_group_sizes = (32, 64, 128, 256)

    @property
    def layout(self) -> str:
        return f"{super().layout}-{torch.backends.cpu.get_cpu_capability().lower()}"

    def supports(self, rows: int, columns: int) -> str | None:
        if rows % 16:
            return f"int4 on the CPU needs N divisible by 16, not {rows}"
        if columns % 32:
            return f"int4 on the CPU needs K divisible by 32, not {columns}"
        return None

    def group_size(self, columns: int) -> int:
        return int4_group_size(columns)

    def pack(self, quantized: QuantizedWeight) -> dict[str, torch.Tensor]:
        """`codes` uint8 `[N, K / 2]`, `scales_and_zeros` bfloat16 `[K / group, N, 2]`."""
        # The second argument is a tiling factor of the CUDA packer; the CPU's ignores it.
        codes = torch._convert_weight_to_int4pack_for_cpu(quantized.codes.int(), 1)
        pairs = torch.stack((quantized.scales.t(), quantized.zeros.t()), dim=-1)
        return {"codes": codes, "scales_and_zeros": pairs.contiguous()}

    def pack_integer_zeros(self, quantized: IntegerZeros) -> dict[str, torch.Tensor]:
        """Scales and the values of code 8 are rounded to bfloat16: by 1/256 of themselves."""
        scales = quantized.scales.float()
        groups = scales.shape[1]
        zeros = (8 - quantized.zeros.float()) * scales
        return self.pack(
            QuantizedWeight(
                codes=quantized.codes,
                scales=scales.to(self.parameter_dtype),
                zeros=zeros.to(self.parameter_dtype),
                bits=self.nominal_bits,
                group_size=quantized.codes.shape[1] // groups,
            )
        )

    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = rows_of(x, torch.bfloat16)  # with float32 the kernel is 10 times slower
        pairs = parts["scales_and_zeros"]
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, parts["codes"], rows.shape[1] // pairs.shape[0], pairs
        )
        return finish(y, x, bias)
