"""fp8 and nested_fp8 as a memory backend uses them, and the preflight."""

from __future__ import annotations

import pytest
import torch

from sglang_morph.precision.nested.encoding import Nesting
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants.base import DerivedVariant, NestedVariant, Parts, Variant
from sglang_morph.precision.variants.fp8 import Fp8
from sglang_morph.precision.variants.nested_fp8 import NestedFp8
from sglang_morph.precision.variants.preflight import WrongKernel, preflight
from sglang_morph.precision.variants.registry import create_variant

NESTED = [Nesting.E4M3, Nesting.E5M2]
DTYPES = [torch.float16, torch.bfloat16]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def gaussian(
    rows: int = 64, columns: int = 96, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)


def weight_for(nesting: Nesting, dtype: torch.dtype) -> torch.Tensor:
    """With some exceptions where it is bf16."""
    weight = gaussian(dtype=dtype)
    weight[5, :7] = 3.3e-7
    if nesting is Nesting.E5M2:
        weight[7, 3] = -5.0
    return weight


def create(name: str) -> DerivedVariant:
    variant = create_variant(name, "cpu", create_quantizer("rtn"))
    assert isinstance(variant, DerivedVariant)
    return variant


def nested_for(weight: torch.Tensor) -> NestedVariant:
    variant = create("nested_fp8").for_weight(weight)
    assert isinstance(variant, NestedFp8)
    return variant


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("nesting", NESTED)
def test_parts_and_residual_are_the_weight(nesting: Nesting, dtype: torch.dtype) -> None:
    weight = weight_for(nesting, torch.bfloat16).to(dtype)
    variant = nested_for(weight)
    parts, residual = variant.encode(weight), variant.residual(weight)
    assert parts["codes"].dtype == nesting.dtype
    assert residual["lower"].shape == weight.shape
    assert ("exception_index" in residual) == (dtype != torch.float16)
    back = torch.full_like(weight, torch.nan)
    variant.rebuild(parts, residual, back)
    assert same_bits(back, weight)


@pytest.mark.parametrize("name", ["fp8", "nested_fp8"])
def test_deriving_in_blocks_of_rows_equals_deriving_at_once(name: str) -> None:
    weight = gaussian()
    variant = create(name)
    at_once = variant.encode(weight)
    parts = variant.empty_parts(64, 96, "cpu")
    layout = variant.empty_parts(64, 96, "meta")
    for start, stop in [(0, 1), (1, 2), (2, 4), (4, 64)]:
        variant.derive(weight[start:stop], {n: part[start:stop] for n, part in parts.items()})
    for part_name, part in at_once.items():
        assert torch.equal(part.view(torch.uint8), parts[part_name].view(torch.uint8))
        assert (part.shape, part.dtype) == (layout[part_name].shape, layout[part_name].dtype)
    assert list(at_once) == list(layout)


def test_rebuilding_in_blocks_of_rows() -> None:
    weight = weight_for(Nesting.E4M3, torch.bfloat16)
    variant = nested_for(weight)
    parts, residual = variant.encode(weight), variant.residual(weight)
    back = torch.empty_like(weight)
    for start, stop in [(32, 64), (16, 32), (0, 16)]:
        block = {name: part[start:stop] for name, part in parts.items()}
        variant.rebuild(block, {"lower": residual["lower"][start:stop]}, back[start:stop])
    assert not torch.equal(back, weight)
    variant.patch(residual, back)
    assert same_bits(back, weight)


def test_each_weight_gets_what_its_values_allow() -> None:
    variant = create("nested_fp8")
    chosen = variant.for_weight(weight_for(Nesting.E5M2, torch.float16))
    assert isinstance(chosen, NestedFp8) and chosen.nesting is Nesting.E5M2
    for unfit in (gaussian().float() * 1.1, gaussian() * 1e-5):
        chosen = variant.for_weight(unfit)
        assert isinstance(chosen, Fp8) and chosen.name == "fp8"
        assert preflight(chosen, unfit, "here") < 0.01
        with pytest.raises(ValueError, match="cannot be nested as e4m3"):
            variant.encode(unfit)
    with pytest.raises(ValueError, match="cannot be nested as e4m3"):
        variant.encode(weight_for(Nesting.E5M2, torch.float16))


@pytest.mark.parametrize("name", ["fp8", "nested_fp8"])
def test_a_damaged_weight_is_refused(name: str) -> None:
    weight = gaussian()
    weight[3, 5] = torch.nan
    for use in (create(name).for_weight, Fp8(create_quantizer("rtn")).encode):
        with pytest.raises(ValueError, match="row 3, column 5"):
            use(weight)


def test_rows_without_weights() -> None:
    weight = gaussian(dtype=torch.float16)
    weight[9] = 0
    for name in ("fp8", "nested_fp8"):
        variant = create(name)
        y = variant.linear(variant.encode(weight), torch.ones(3, 96).half(), None)
        assert torch.isfinite(y).all() and (y[:, 9] == 0).all()


def test_fp8_scales_follow_each_row() -> None:
    weight = gaussian(dtype=torch.float16) * torch.logspace(-2, 2, 64).half().unsqueeze(-1)
    variant = create("fp8")
    parts = variant.encode(weight)
    assert (parts["codes"].float().abs().amax(dim=-1) == 448).all()
    error = (variant.reference(weight) - weight.float()).norm(dim=-1) / weight.float().norm(dim=-1)
    assert (error < 0.04).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["nested_fp8", "fp8", "int8", "int4"])
def test_preflight_accepts_right_kernels(name: str, dtype: torch.dtype) -> None:
    weight = gaussian(dtype=dtype)
    variant = create_variant(name, "cpu", create_quantizer("rtn"))
    assert preflight(variant.for_weight(weight), weight, "layer 3, mlp.down_proj") < 0.01
    assert preflight(variant, torch.zeros_like(weight), "layer 3, mlp.down_proj") == 0


class WrongScale(Fp8):
    def derive(self, full: torch.Tensor, out: Parts) -> None:
        super().derive(full, out)
        out["scales"].mul_(1.1)


class Missing(Fp8):
    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("no kernel image is available\nand more")


class Damaged(Fp8):
    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().linear(parts, x, bias) * torch.nan


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (WrongScale, r"^layer 3, mlp.down_proj: torch .* is off by 0\.(099|100) .* at 1 tokens"),
        (Missing, r"^layer 3, mlp.down_proj: torch .* failed: no kernel image is available; leave"),
        (Damaged, r"^layer 3, mlp.down_proj: torch .* is off by nan"),
    ],
)
def test_preflight_refuses_wrong_kernels(broken: type[Variant], message: str) -> None:
    with pytest.raises(WrongKernel, match=message) as caught:
        preflight(broken(create_quantizer("rtn")), gaussian(), "layer 3, mlp.down_proj")
    assert "\n" not in str(caught.value)


def test_real_weights_come_back(smollm2_weights: dict[str, torch.Tensor]) -> None:
    for name, weight in smollm2_weights.items():
        for dtype in (*DTYPES, torch.float32):
            exact = weight.to(dtype)
            variant = create("nested_fp8").for_weight(exact)
            assert isinstance(variant, NestedVariant), name
            back = torch.empty_like(exact)
            variant.rebuild(variant.encode(exact), variant.residual(exact), back)
            assert same_bits(back, exact), name
            error = variant.reference(exact) - exact.float()
            assert error.norm() / exact.float().norm() < 0.06, name
