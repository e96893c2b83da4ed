from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sglang_morph.precision.quantizers.base import QuantizedWeight
from sglang_morph.precision.quantizers.registry import create_quantizer

STEADY = settings(deadline=None, derandomize=True)
RTN = create_quantizer("rtn")
LARGE = 1.0000000150474662e30  # a float32


@st.composite
def weights(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """A float32 weight of any magnitudes, and a group size that divides its K."""
    group_size = draw(st.sampled_from([1, 2, 4, 8]))
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    top = draw(st.sampled_from([1e-3, 1.0, 100.0, LARGE]))
    elements = st.floats(-np.float32(top).item(), np.float32(top).item(), width=32)
    array = draw(arrays(np.float32, (shape[0], shape[1] * group_size), elements=elements))
    return torch.from_numpy(array), group_size


@STEADY
@given(weights(), st.integers(2, 8), st.sampled_from([torch.float32, torch.bfloat16]))
def test_error_is_at_most_half_a_scale(
    weight_and_group: tuple[torch.Tensor, int], bits: int, dtype: torch.dtype
) -> None:
    weight, group_size = weight_and_group
    quantized = RTN.quantize(weight, bits, group_size, dtype)
    assert quantized.codes.dtype == torch.uint8
    assert int(quantized.codes.max()) < 1 << bits
    assert quantized.scales.dtype == quantized.zeros.dtype == dtype
    groups = weight.shape[1] // group_size
    assert quantized.scales.shape == quantized.zeros.shape == (weight.shape[0], groups)
    assert (quantized.scales > 0).all()

    error = (weight.double() - quantized.dequantize().double()).abs()
    half = quantized.scales.double().repeat_interleave(group_size, dim=1) / 2
    # float32 arithmetic in quantizing and dequantizing, relative to the largest of the group.
    largest = weight.double().view(weight.shape[0], groups, group_size).abs().amax(-1)
    slack = largest.repeat_interleave(group_size, dim=1) * 1e-6
    assert (error <= half + slack).all()


@STEADY
@given(st.floats(-1e4, 1e4, width=32), st.integers(2, 8))
def test_constant_groups_are_nearly_exact(value: float, bits: int) -> None:
    weight = torch.full((2, 8), value)
    torch.testing.assert_close(RTN.quantize(weight, bits, 4).dequantize(), weight)
    rounded = RTN.quantize(weight, bits, 4, torch.bfloat16).dequantize()
    torch.testing.assert_close(rounded, weight, rtol=1 / 512, atol=1e-37)


def test_zeros_stay_zero() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert (RTN.quantize(torch.zeros(3, 64), 4, 32, dtype).dequantize() == 0).all()


def test_the_range_is_used_fully() -> None:
    """Asymmetric: weights far from 0 lose no codes."""
    weight = torch.linspace(3.0, 4.0, 256).view(1, 256)
    quantized = RTN.quantize(weight, 8, 256)
    assert quantized.codes.unique().numel() == 256
    assert quantized.scales.item() == pytest.approx(1 / 255, rel=1e-4)


def test_the_zero_is_the_value_of_the_middle_code() -> None:
    quantized = QuantizedWeight(
        codes=torch.tensor([[0, 8, 15, 7]], dtype=torch.uint8),
        scales=torch.tensor([[0.5, 2.0]]),
        zeros=torch.tensor([[1.0, -1.0]]),
        bits=4,
        group_size=2,
    )
    assert quantized.dequantize().tolist() == [[-3.0, 1.0, 13.0, -3.0]]


def test_codes_fit_the_rounded_parameters() -> None:
    """Codes chosen against unrounded scales and zeros would be worse after rounding."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=generator) + 20.0
    rounded = RTN.quantize(weight, 8, 64, torch.bfloat16)
    exact = RTN.quantize(weight, 8, 64)
    late = QuantizedWeight(exact.codes, exact.scales.bfloat16(), exact.zeros.bfloat16(), 8, 64)
    error = (rounded.dequantize() - weight).norm()
    assert error < (late.dequantize() - weight).norm() / 2


@pytest.mark.parametrize(
    ("weight", "bits", "group_size", "message"),
    [
        (torch.ones(2, 48), 4, 32, "32 does not divide K = 48"),
        (torch.ones(2, 48), 4, 0, "does not divide"),
        (torch.ones(2, 32), 9, 32, "9 bits"),
        (torch.ones(32), 4, 32, r"\[N, K\]"),
        (torch.ones(2, 32, dtype=torch.int8), 4, 32, "floating"),
        (torch.tensor([[0.0, 1.0], [2.0, torch.nan]]), 4, 2, "row 1, column 1"),
        (torch.tensor([[0.0, -torch.inf], [2.0, 1.0]]), 4, 2, "1 values.*row 0, column 1"),
        (torch.tensor([[-1.0e6, 1.0e6]]), 2, 2, "exceeds"),
    ],
)
def test_bad_weights_are_refused(
    weight: torch.Tensor, bits: int, group_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RTN.quantize(weight, bits, group_size, torch.float16)


def test_half_precision_weights_are_taken() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).half()
    from_half = RTN.quantize(weight, 4, 32).dequantize()
    assert torch.equal(from_half, RTN.quantize(weight.float(), 4, 32).dequantize())


def test_unknown_quantizers_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown quantizer 'best'; known are rtn"):
        create_quantizer("best")
