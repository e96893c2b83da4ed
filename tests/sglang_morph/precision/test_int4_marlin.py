"""What of Marlin's int4 does not need a GPU: codes, zero points, AWQ's packing."""

from __future__ import annotations

import pytest
import torch

from sglang_morph.precision.quantizers.integer_zeros import quantize_integer_zeros
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants.int4_marlin import GROUP_SIZE, pack_awq
from sglang_morph.precision.variants.registry import create_variant


def weights(rows: int = 64, columns: int = 384, offset: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(rows, columns, generator=generator) * 0.02 + offset).half()


@pytest.mark.parametrize("offset", [0.0, 0.03, -0.5, 0.5])
def test_error_is_at_most_a_step(offset: float) -> None:
    weight = weights(offset=offset)
    quantized = quantize_integer_zeros(weight, 4, GROUP_SIZE)
    assert quantized.codes.max() <= 15 and quantized.zeros.max() <= 15
    assert (quantized.scales > 0).all() and quantized.scales.dtype == weight.dtype
    error = (quantized.dequantize() - weight.float()).abs().view(64, -1, GROUP_SIZE)
    assert (error <= quantized.scales.float().unsqueeze(-1) * 1.02).all()
    if offset == 0:
        assert error.norm() / weight.float().norm() < 0.12


def test_zero_is_exact() -> None:
    weight = weights()
    weight[:, ::3] = 0
    weight[5] = 0
    back = quantize_integer_zeros(weight, 4, GROUP_SIZE).dequantize()
    assert (back[weight == 0] == 0).all()


def test_packing_is_that_of_awq_checkpoints() -> None:
    """SGLang's own dequantizer for such checkpoints reads it."""
    from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_decomposition

    weight = weights(offset=0.01)
    quantized = quantize_integer_zeros(weight, 4, GROUP_SIZE)
    read = awq_dequantize_decomposition(
        pack_awq(quantized.codes),
        quantized.scales.t().float().contiguous(),
        pack_awq(quantized.zeros),
    )
    torch.testing.assert_close(read.t(), quantized.dequantize(), rtol=0, atol=0)


def test_packed_words_lie_as_the_kernels_read_them() -> None:
    packed = pack_awq(quantize_integer_zeros(weights(), 4, GROUP_SIZE).codes)
    assert packed.shape == (384, 8) and packed.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_reference_is_the_quantized_weight(dtype: torch.dtype) -> None:
    weight = weights().to(dtype)
    reference = create_variant("int4", "cuda", create_quantizer("rtn")).reference(weight)
    assert (reference - weight.float()).norm() / weight.float().norm() < 0.12


def test_weights_it_does_not_take() -> None:
    variant = create_variant("int4", "cuda", create_quantizer("rtn"))
    with pytest.raises(ValueError, match="16-bit weight"):
        variant.reference(weights().float())
    broken = weights()
    broken[3, 5] = torch.inf
    with pytest.raises(ValueError, match="row 3, column 5"):
        variant.encode(broken)
