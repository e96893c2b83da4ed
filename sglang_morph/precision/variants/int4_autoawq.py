"""int4 on a GPU through the kernels of `autoawq-kernels`, where they can be used."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType

import torch
from torch.nn.functional import linear

from sglang_morph.precision.quantizers.base import Quantizer
from sglang_morph.precision.quantizers.integer_zeros import IntegerZeros, quantize_integer_zeros
from sglang_morph.precision.variants.base import Parts, Variant, finish
from sglang_morph.precision.variants.int4_marlin import BITS, GROUP_SIZE, Int4Marlin, pack_awq

logger = logging.getLogger(__name__)

MODULE = "awq_ext"
SPLIT_K = 8
DEQUANTIZED_FROM = 1024
"""Tokens from which dequantizing the weight for cuBLAS is faster, by AutoAWQ's own rule."""


def create_int4(quantizer: Quantizer) -> Variant:
    """The int4 of this machine: AutoAWQ's kernels where they can be used, else Marlin."""
    return Int4Marlin(quantizer) if _obstacle() else Int4AutoAwq(quantizer)


class Int4AutoAwq(Int4Marlin):
    """For float16: these kernels take nothing else, and bf16's range would be lost.

    Parts as AWQ checkpoints have them: `codes` int32 `[K, N / 8]`, `scales` float16
    `[K / group, N]`, `zeros` int32 `[K / group, N / 8]`.
    """

    kernel = "autoawq-kernels"

    def is_built(self, dtype: torch.dtype) -> bool:
        """They come compiled; other types are left to Marlin."""
        return dtype == torch.float16 or super().is_built(dtype)

    def for_weight(self, weight: torch.Tensor) -> Variant:
        return self if weight.dtype == torch.float16 else Int4Marlin(self._quantizer)

    def pack_integer_zeros(self, quantized: IntegerZeros) -> dict[str, torch.Tensor]:
        return {name: part.cpu() for name, part in _awq_parts(quantized).items()}

    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1]).contiguous()
        weight = (parts["codes"], parts["scales"], parts["zeros"])
        if tokens.shape[0] == 0:
            y = tokens.new_empty(0, parts["scales"].shape[1])
        elif tokens.shape[0] < DEQUANTIZED_FROM:
            y = _kernels().gemm_forward_cuda(tokens, *weight, SPLIT_K)
        else:
            y = tokens @ _kernels().dequantize_weights_cuda(*weight, 0, 0, 0, False)
        return finish(y, x, bias)


def _kernels() -> ModuleType:
    return importlib.import_module(MODULE)


@cache
def _obstacle() -> str | None:
    """Why AutoAWQ's kernels can't be used, said once in the log; None if they can."""
    try:
        _kernels()
        reason = None if _follow_streams() else "they do not run on the stream they are called on"
    except Exception as error:  # whatever a binary of another torch and CUDA raises
        reason = str(error).partition("\n")[0]
    if reason:
        logger.info("autoawq-kernels cannot be used (%s); int4 runs SGLang's Marlin", reason)
    return reason


def _follow_streams() -> bool:
    """Whether a captured call computes anew when it is replayed: SGLang's streams need that."""
    weight = torch.randn(GROUP_SIZE, GROUP_SIZE, generator=torch.Generator().manual_seed(0)).half()
    quantized = quantize_integer_zeros(weight, BITS, GROUP_SIZE)
    codes, scales, zeros = (part.cuda() for part in _awq_parts(quantized).values())
    x = torch.zeros(16, GROUP_SIZE, dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = _kernels().gemm_forward_cuda(x, codes, scales, zeros, SPLIT_K)
    x.fill_(1)
    graph.replay()
    expected = linear(x.float(), quantized.dequantize().cuda())
    return bool((y.float() - expected).norm() <= 0.01 * expected.norm())


def _awq_parts(quantized: IntegerZeros) -> dict[str, torch.Tensor]:
    return {
        "codes": pack_awq(quantized.codes),
        "scales": quantized.scales.t().contiguous().half(),
        "zeros": pack_awq(quantized.zeros),
    }
