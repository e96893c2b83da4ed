from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_morph.precision.nested import cpu_kernels
from sglang_morph.precision.nested.encoding import (
    E4M3_BOUND,
    E5M2_BOUND,
    Exceptions,
    Nesting,
    choose_nesting,
    find_exceptions,
    merge,
    patch_exceptions,
    split,
    upper_as_float,
)
from sglang_morph.precision.nested.ops import merge_into, split_into

NESTINGS = [Nesting.E4M3, Nesting.E5M2]
EVERY_CODE = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)


def codes_within(nesting: Nesting, dtype: torch.dtype) -> torch.Tensor:
    """All 16-bit codes of `dtype` whose value the nesting takes, negative zero included."""
    values = EVERY_CODE.view(dtype)
    magnitude = values.float().abs()
    if nesting is Nesting.E4M3:
        return values[magnitude <= E4M3_BOUND]
    return values[magnitude < E5M2_BOUND]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = torch.int32 if one.dtype is torch.float32 else torch.int16
    return torch.equal(one.view(bits), other.view(bits))


def gaussian(*shape: int, sigma: float = 0.02, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * sigma).to(dtype)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_every_fp16_code_comes_back(nesting: Nesting) -> None:
    weight = codes_within(nesting, torch.float16)
    assert len(weight) == {Nesting.E4M3: 2 * 0x3F01, Nesting.E5M2: 2 * 0x7B80}[nesting]
    upper, lower = split(weight, nesting)
    assert upper.dtype == lower.dtype == torch.uint8
    assert same_bits(merge(upper, lower, nesting), weight)


def test_the_e4m3_upper_byte_is_what_torch_converts_to() -> None:
    weight = codes_within(Nesting.E4M3, torch.float16)
    expected = (weight.float() * 256).to(torch.float8_e4m3fn)
    assert torch.isfinite(expected.float()).all()
    assert torch.equal(split(weight)[0], expected.view(torch.uint8))
    assert torch.equal(upper_as_float(weight, Nesting.E4M3) * 256, expected.float())


def test_the_e5m2_upper_byte_rounds_half_away_from_zero() -> None:
    """torch rounds ties to even, so it differs there and nowhere else."""
    weight = codes_within(Nesting.E5M2, torch.float16)
    upper = split(weight, Nesting.E5M2)[0].view(torch.float8_e5m2)
    assert torch.isfinite(upper.float()).all()
    nearest = weight.float().to(torch.float8_e5m2)
    differs = upper.view(torch.uint8) != nearest.view(torch.uint8)
    tie = weight.view(torch.int16) & 0xFF == 0x80
    assert differs.any() and not (differs & ~tie).any()
    assert (upper.float().abs() >= weight.float().abs())[tie].all()


@pytest.mark.parametrize("nesting", NESTINGS)
def test_every_bf16_code_comes_back(nesting: Nesting) -> None:
    weight = codes_within(nesting, torch.bfloat16)
    exceptions = find_exceptions(weight)
    assert (weight[exceptions.index].float().abs() < 2.0**-17).all()
    upper, lower = split(weight.to(torch.float16), nesting)
    back = merge(upper, lower, nesting).to(torch.bfloat16)
    assert not same_bits(back, weight)
    patch_exceptions(back, exceptions)
    assert same_bits(back, weight)


@pytest.mark.parametrize("loaded", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_every_16_bit_code_comes_back_in_float32(nesting: Nesting, loaded: torch.dtype) -> None:
    """As a CPU computes with it."""
    weight = codes_within(nesting, loaded).float()
    exceptions = find_exceptions(weight)
    assert (exceptions.index.numel() == 0) == (loaded is torch.float16)
    assert exceptions.bits.dtype == torch.int32
    weight = weight[: len(weight) // 2 * 2]
    upper, lower = (torch.empty(len(weight), dtype=torch.uint8) for _ in range(2))
    split_into(weight, upper, lower, nesting)
    back = torch.full_like(weight, math.nan)
    merge_into(upper, lower, back, nesting)
    patch_exceptions(back, find_exceptions(weight))
    assert same_bits(back, weight)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_merging_in_blocks_equals_the_definition(
    nesting: Nesting, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = codes_within(nesting, torch.float16)
    upper, lower = split(weight, nesting)
    assert same_bits(merge(upper, lower, nesting), weight)
    monkeypatch.setattr(cpu_kernels, "BLOCK", 1000)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        back = torch.full(weight.shape, math.nan, dtype=dtype)
        merge_into(upper, lower, back, nesting)
        assert same_bits(back, weight.to(dtype))


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_computing_with_upper_halves_alone(
    nesting: Nesting, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows at a time, and no other number than what they stand for."""
    weight = gaussian(70, 48)
    upper, _ = split(weight.to(torch.float16), nesting)
    monkeypatch.setattr(cpu_kernels, "BLOCK", 500)
    x = torch.randn(tokens, 48)
    y = cpu_kernels.upper_linear(upper, x, nesting)
    torch.testing.assert_close(y, x @ upper_as_float(weight, nesting).t())
    every = torch.arange(256).to(torch.uint8)
    every = every[every.view(nesting.dtype).float().isfinite()].unsqueeze(1)
    meant = every.view(nesting.dtype).float() * nesting.scale
    assert torch.equal(cpu_kernels.upper_linear(every, torch.ones(1, 1), nesting), meant.t())


def test_bf16_codes_that_are_exceptions() -> None:
    """Of all 65,536 codes: exactly those that fp16 changes, overflow and NaN payloads included."""
    weight = EVERY_CODE.view(torch.bfloat16)
    exceptions = find_exceptions(weight)
    assert exceptions.index.dtype == torch.int32 and exceptions.bits.dtype == torch.int16
    kept = torch.ones(len(weight), dtype=torch.bool)
    kept[exceptions.index] = False
    back = weight.to(torch.float16).to(torch.bfloat16)
    assert same_bits(back[kept], weight[kept])
    assert kept[weight.float().abs() == 2.0**-17].all()
    assert kept[(weight.float().abs() >= 2.0**-17) & (weight.float().abs() < E5M2_BOUND)].all()
    assert kept[weight == 0].sum() == 2


def test_fp16_has_no_exceptions() -> None:
    numbers = EVERY_CODE.view(torch.float16)
    assert find_exceptions(numbers).index.numel() == 0


@st.composite
def weights(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16]))
    bound = draw(st.sampled_from([2.0**-20, 2.0**-10, 0.125, E4M3_BOUND, 100.0, 61000.0]))
    rows, columns = draw(st.integers(1, 5)), 2 * draw(st.integers(1, 9))
    numbers = st.floats(-bound, bound, width=32)
    values = draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values).to(dtype).view(rows, columns)


@settings(max_examples=200, deadline=None)
@given(weights())
def test_any_tensor_within_the_bound_comes_back(weight: torch.Tensor) -> None:
    nesting = Nesting.E4M3 if weight.float().abs().max() <= E4M3_BOUND else Nesting.E5M2
    if weight.float().abs().max() >= E5M2_BOUND:
        return
    upper, lower = (torch.empty_like(weight, dtype=torch.uint8) for _ in range(2))
    split_into(weight, upper, lower, nesting)
    back = torch.full_like(weight, math.nan)
    merge_into(upper, lower, back, nesting)
    patch_exceptions(back, find_exceptions(weight))
    assert same_bits(back, weight)
    only_upper = torch.empty_like(upper)
    split_into(weight, only_upper, None, nesting)
    assert torch.equal(only_upper, upper)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_choice_follows_the_largest_magnitude(dtype: torch.dtype) -> None:
    weight = gaussian(64, 64, dtype=dtype)
    assert choose_nesting(weight) is Nesting.E4M3
    for value, chosen in [
        (1.75, Nesting.E4M3),
        (-1.75, Nesting.E4M3),
        (1.7578125, Nesting.E5M2),
        (-1.7578125, Nesting.E5M2),
        (61184.0, Nesting.E5M2),
        (61440.0, Nesting.NONE),
        (-61440.0, Nesting.NONE),
        (math.inf, Nesting.NONE),
        (-math.inf, Nesting.NONE),
        (math.nan, Nesting.NONE),
    ]:
        weight[3, 5] = value
        assert choose_nesting(weight) is chosen, value


def test_what_cannot_be_nested() -> None:
    assert choose_nesting(gaussian(64, 64).float()) is Nesting.E4M3
    assert choose_nesting(gaussian(64, 64).float() * 1.1) is Nesting.NONE
    assert choose_nesting(gaussian(64, 64).double()) is Nesting.NONE
    assert choose_nesting(torch.zeros(4, 4, dtype=torch.float16)) is Nesting.E4M3
    too_many_exceptions = gaussian(64, 64)
    too_many_exceptions[:1] = 3.3e-7
    assert choose_nesting(too_many_exceptions) is Nesting.NONE
    underflow = gaussian(64, 64, sigma=1e-5, dtype=torch.float16)
    assert choose_nesting(underflow) is Nesting.NONE


def test_gaussian_weights_lose_what_the_encoding_says() -> None:
    weight = gaussian(256, 1024)
    exact = weight.float()
    errors = [
        float((upper_as_float(weight, nesting) - exact).norm() / exact.norm())
        for nesting in NESTINGS
    ]
    assert errors == [pytest.approx(0.027, abs=0.002), pytest.approx(0.053, abs=0.003)]
    assert find_exceptions(weight).index.numel() < 0.001 * weight.numel()


def test_patching_no_exceptions_changes_nothing() -> None:
    weight = gaussian(4, 4)
    before = weight.clone()
    none = Exceptions(torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int16))
    patch_exceptions(weight, none)
    assert same_bits(weight, before)


def test_real_weights_nest_as_e4m3(smollm2_weights: dict[str, torch.Tensor]) -> None:
    for name, weight in smollm2_weights.items():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert choose_nesting(weight.to(dtype)) in NESTINGS, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(2, 4).double()}, "float64 cannot be nested on cpu"),
        ({"weight": torch.zeros(3, 3, dtype=torch.float16)}, "in pairs, not 9"),
        ({"upper": torch.zeros(2, 4, dtype=torch.int8)}, "are uint8 of that shape"),
        ({"upper": torch.zeros(4, 2, dtype=torch.uint8)}, "are uint8 of that shape"),
        ({"lower": torch.zeros(4, 2, dtype=torch.uint8).t()}, "must be contiguous"),
    ],
)
def test_bad_arguments(change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {
        "weight": torch.zeros(2, 4, dtype=torch.float16),
        "upper": torch.zeros(2, 4, dtype=torch.uint8),
        "lower": torch.zeros(2, 4, dtype=torch.uint8),
    } | change
    with pytest.raises(ValueError, match=message):
        split_into(**arguments, nesting=Nesting.E4M3)
    with pytest.raises(ValueError, match=message):
        merge_into(**arguments, nesting=Nesting.E4M3)
