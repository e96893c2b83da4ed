"""int4 on a GPU: AWQ's layout in groups of 128, through SGLang's Marlin kernels.

The kernels are compiled when first used, which takes minutes on a cold machine.
"""

from __future__ import annotations

import torch

from sglang_morph.precision.quantizers.base import check_weight
from sglang_morph.precision.quantizers.integer_zeros import IntegerZeros, quantize_integer_zeros
from sglang_morph.precision.variants.base import IntegerZerosVariant, Parts, finish
from sglang_morph.precision.variants.marlin_build import ensure_built, is_built

BITS = 4
GROUP_SIZE = 128
NIBBLES_PER_WORD = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring columns AWQ keeps in nibble 0, 1, ... of a word."""


class Int4Marlin(IntegerZerosVariant):
    """Marlin wants integer zero points, so this rounds to nearest itself, whatever the quantizer.

    Parts, all as the kernel reads them: `codes` int32 `[K / 16, 2 N]`, `scales` `[K / group, N]` in
    the weight's dtype, `zeros` int32 `[K / group, N / 8]`, and `workspace` int32, one lock for each
    multiprocessor, 0 between calls.
    """

    name = "int4"
    kernel = "SGLang Marlin (AWQ)"
    integer_group_sizes = (32, 64, 128)

    def supports(self, rows: int, columns: int) -> str | None:
        if columns % GROUP_SIZE:
            return f"int4 (Marlin) needs K divisible by {GROUP_SIZE}, not {columns}"
        if rows % 64:
            return f"int4 (Marlin) needs N divisible by 64, not {rows}"
        return None

    def group_size(self, columns: int) -> int:
        return GROUP_SIZE

    def is_built(self, dtype: torch.dtype) -> bool:
        """Whether the kernels for weights of `dtype` need not be compiled."""
        return is_built(dtype)

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.pack_integer_zeros(self._quantize(weight))

    def pack_integer_zeros(self, quantized: IntegerZeros) -> dict[str, torch.Tensor]:
        """Repacked on the GPU; scales must be in the dtype of the activations."""
        from sglang.kernels.ops.quantization.awq_marlin_repack import awq_marlin_repack
        from sglang.srt.layers.quantization.marlin_utils import (
            marlin_make_workspace,
            marlin_permute_scales,
            marlin_zero_points,
        )

        ensure_built(quantized.scales.dtype)
        rows, columns = quantized.codes.shape
        groups = quantized.scales.shape[1]
        device = torch.device("cuda", torch.cuda.current_device())
        words = pack_awq(quantized.codes).to(device)
        parts = {
            "codes": awq_marlin_repack(words, columns, rows, BITS),
            "scales": marlin_permute_scales(
                quantized.scales.t().contiguous(), columns, rows, columns // groups
            ),
            "zeros": marlin_zero_points(quantized.zeros.t().int(), groups, rows, BITS),
            "workspace": marlin_make_workspace(device),
        }
        return {name: part.cpu() for name, part in parts.items()}

    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from sgl_kernel.scalar_type import scalar_types
        from sglang.kernels.ops.quantization.gptq_marlin import gptq_marlin_gemm

        tokens = x.reshape(-1, x.shape[-1]).contiguous()
        y = gptq_marlin_gemm(
            a=tokens,
            c=None,
            b_q_weight=parts["codes"],
            b_scales=parts["scales"],
            global_scale=None,
            b_zeros=parts["zeros"],
            g_idx=None,
            perm=None,
            workspace=parts["workspace"],
            b_q_type=scalar_types.uint4,
            size_m=tokens.shape[0],
            size_n=parts["scales"].shape[1],
            size_k=tokens.shape[1],
            use_fp32_reduce=True,
        )
        return finish(y, x, bias)

    def reference(self, weight: torch.Tensor) -> torch.Tensor:
        return self._quantize(weight).dequantize()

    def _quantize(self, weight: torch.Tensor) -> IntegerZeros:
        if weight.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"int4 (Marlin) needs a 16-bit weight, not {weight.dtype}")
        if reason := self.supports(*weight.shape):
            raise ValueError(reason)
        check_weight(weight, BITS, GROUP_SIZE)
        return quantize_integer_zeros(weight, BITS, GROUP_SIZE)


def pack_awq(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes uint8 `[N, K]` as AWQ checkpoints hold them: int32 `[K, N / 8]`, contiguous."""
    columns = codes.t().contiguous().int()
    grouped = columns.reshape(columns.shape[0], -1, NIBBLES_PER_WORD)
    words = torch.zeros_like(grouped[..., 0])
    for nibble, column in enumerate(AWQ_ORDER):
        words |= grouped[..., column] << (4 * nibble)
    return words
