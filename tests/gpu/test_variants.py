"""The variants of `cuda` on a GPU: their kernels, shapes at the edge, CUDA graphs."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn.functional import linear

from benchmarks.kernels import (
    check_every_code,
    check_round_trip,
    empty_parts,
    gaussian,
    variant_for,
    weight_for,
)
from sglang_morph.precision.nested.encoding import Nesting
from sglang_morph.precision.quantizers.integer_zeros import quantize_integer_zeros
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants.base import (
    DerivedVariant,
    IntegerZerosVariant,
    NestedVariant,
    Variant,
)
from sglang_morph.precision.variants.fp8 import Fp8
from sglang_morph.precision.variants.preflight import preflight
from sglang_morph.precision.variants.registry import create_variant, default_variants

FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
needs_fp8 = pytest.mark.skipif(not FP8, reason="needs FP8 tensor cores (SM89 or newer)")

DTYPES = [torch.bfloat16, torch.float16]
NESTINGS = [Nesting.E4M3, Nesting.E5M2]
SHAPES = [(4096, 4096), (960, 576), (576, 1536), (16, 16)]


def as_made(variant: Variant, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Parts on the GPU: derived where possible."""
    if isinstance(variant, DerivedVariant):
        parts = empty_parts(variant, weight)
        variant.derive(weight, parts)
        return parts
    return {name: part.cuda() for name, part in variant.encode(weight).items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_split_and_merge(dtype: torch.dtype, nesting: Nesting) -> None:
    assert check_every_code(dtype, nesting) is None
    for shape in [(1, 2), (3, 10), (129, 4098), (4096, 14336)]:
        assert check_round_trip(weight_for(nesting, shape, dtype), nesting) is None


@needs_fp8
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_parts_and_residual_are_the_weight(nesting: Nesting, dtype: torch.dtype) -> None:
    weight = weight_for(nesting, (960, 576), dtype)
    variant = variant_for("nested_fp8", weight)
    assert isinstance(variant, NestedVariant)
    parts = as_made(variant, weight)
    residual = {name: part.cuda() for name, part in variant.residual(weight).items()}
    back = torch.full_like(weight, torch.nan)
    variant.rebuild(parts, residual, back)
    assert torch.equal(back.view(torch.int16), weight.view(torch.int16))


@needs_fp8
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["nested_fp8 e4m3", "nested_fp8 e5m2", "fp8"])
def test_fp8_at_every_batch_size(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    nesting = Nesting.E5M2 if name.endswith("e5m2") else Nesting.E4M3
    weight = weight_for(nesting, shape, dtype)
    variant = variant_for(name.partition(" ")[0], weight)
    parts, reference = as_made(variant, weight), variant.reference(weight)
    bias = torch.randn(shape[0], device="cuda").to(dtype)
    for batch in (1, 2, 3, 15, 16, 17, 63, 65, 129, 1000, 2113):
        x = torch.randn(batch, shape[1], device="cuda").to(dtype)
        y = variant.linear(parts, x, bias)
        assert y.dtype == dtype and y.shape == (batch, shape[0])
        expected = linear(x.float(), reference, bias.float())
        assert (y.float() - expected).norm() <= variant.tolerance * expected.norm(), batch
    assert variant.linear(parts, x[:0], bias).shape == (0, shape[0])
    three_d = x[:6].view(2, 3, -1)
    same = variant.linear(parts, x[:6], None).view(2, 3, -1)
    assert torch.equal(variant.linear(parts, three_d, None), same)
    # A row of zeros has scale 0 and must not become NaN.
    assert torch.equal(variant.linear(parts, torch.zeros_like(x), bias)[3], bias)


@needs_fp8
@pytest.mark.parametrize("name", ["nested_fp8", "fp8"])
def test_derived_in_blocks_of_rows_and_as_on_the_cpu(name: str) -> None:
    weight = gaussian(960, 576, torch.bfloat16)
    variant = variant_for(name, weight)
    assert isinstance(variant, DerivedVariant)
    at_once, parts = as_made(variant, weight), empty_parts(variant, weight)
    for start, stop in [(0, 1), (1, 2), (2, 4), (4, 960)]:
        block = {part_name: part[start:stop] for part_name, part in parts.items()}
        variant.derive(weight[start:stop], block)
    for part_name, part in at_once.items():
        assert torch.equal(part.view(torch.uint8), parts[part_name].view(torch.uint8))
    derived = at_once["codes"].float() * at_once["scales"].unsqueeze(-1)
    reference = variant.reference(weight)
    assert (derived - reference).norm() <= 1e-3 * reference.norm()


@needs_fp8
@pytest.mark.parametrize("name", ["nested_fp8", "fp8"])
def test_a_captured_graph_reads_parts_at_their_address(name: str) -> None:
    first, second = (gaussian(960, 576, torch.bfloat16) * factor for factor in (1, 3))
    variant = variant_for(name, first)
    parts, x = as_made(variant, first), torch.randn(5, 576, device="cuda").bfloat16()
    variant.linear(parts, x, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = variant.linear(parts, x, None)
    assert isinstance(variant, DerivedVariant)
    variant.derive(second, parts)
    graph.replay()
    assert torch.equal(y, variant.linear(parts, x, None))


@needs_fp8
def test_what_cannot_be_nested_is_scaled() -> None:
    weight = gaussian(960, 576, torch.bfloat16) * 1e-5
    variant = variant_for("nested_fp8", weight)
    assert isinstance(variant, Fp8) and variant.kernel == "sgl_kernel.fp8_scaled_mm"
    assert preflight(variant, weight, "here") < variant.tolerance


def test_default_follows_the_gpu() -> None:
    assert default_variants("cuda") == (("nested_fp8",) if FP8 else ("int8",))


def test_int8_runs() -> None:
    weight = gaussian(960, 576, torch.bfloat16)
    assert preflight(variant_for("int8", weight), weight, "here") < 0.01


@pytest.mark.skipif(
    not os.environ.get("MORPH_TEST_MARLIN"),
    reason="compiling Marlin takes minutes; set MORPH_TEST_MARLIN=1",
)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_marlin_takes_the_codes_of_checkpoints(dtype: torch.dtype, group_size: int) -> None:
    """Codes, scales and zero points as they are: nothing is lost."""
    weight = gaussian(1024, 2048, dtype) + 0.01
    stored = quantize_integer_zeros(weight.cpu(), 4, group_size)
    variant = create_variant("int4", "cuda", create_quantizer("rtn"))
    assert isinstance(variant, IntegerZerosVariant)
    parts = {name: part.cuda() for name, part in variant.pack_integer_zeros(stored).items()}
    x = torch.randn(17, 2048, device="cuda").to(dtype)
    expected = linear(x.float(), stored.dequantize().cuda())
    error = variant.linear(parts, x, None).float() - expected
    assert error.norm() <= variant.tolerance * expected.norm()


@pytest.mark.skipif(
    not os.environ.get("MORPH_TEST_MARLIN"),
    reason="compiling Marlin takes minutes; set MORPH_TEST_MARLIN=1",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_marlin(dtype: torch.dtype) -> None:
    weight = gaussian(4096, 4096, dtype) + 0.01
    variant = variant_for("int4", weight)
    parts, reference = as_made(variant, weight), variant.reference(weight)
    bias = torch.randn(4096, device="cuda").to(dtype)
    for batch in (1, 8, 17, 65, 1000):
        x = torch.randn(batch, 4096, device="cuda").to(dtype)
        expected = linear(x.float(), reference, bias.float())
        error = variant.linear(parts, x, bias).float() - expected
        assert error.norm() <= variant.tolerance * expected.norm(), batch
    assert variant.linear(parts, x[:0], bias).shape == (0, 4096)
    assert (parts["workspace"] == 0).all()
