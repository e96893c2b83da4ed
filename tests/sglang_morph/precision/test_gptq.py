from __future__ import annotations

import pytest
import torch

from sglang_morph.precision.quantizers.gptq import choose_codes, inverse_factor
from sglang_morph.precision.quantizers.integer_zeros import IntegerZeros, quantize_integer_zeros
from sglang_morph.precision.quantizers.layer import variants_for
from sglang_morph.precision.quantizers.registry import create_layer_quantizer
from sglang_morph.precision.quantizers.rtn import RoundToNearest
from sglang_morph.precision.quantizers.statistics import InputStatistics
from sglang_morph.precision.variants.base import Variant
from sglang_morph.precision.variants.int4_marlin import Int4Marlin
from sglang_morph.precision.variants.registry import create_variant
from tests.sglang_morph.precision.test_awq import GQA, MHA, calibrate, error
from tests.sglang_morph.precision.toy_layer import LINEARS, random_layer

GPTQ, RTN = create_layer_quantizer("gptq"), create_layer_quantizer("rtn")
COLUMNS = 256


def int4() -> Variant:
    return create_variant("int4", "cpu", RoundToNearest())


def weight_and_inputs(seed: int = 0, tokens: int = 1024) -> tuple[torch.Tensor, InputStatistics]:
    """A weight `[64, COLUMNS]`, and inputs that lie near a space of few dimensions."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(64, COLUMNS, generator=generator) * 0.1
    mixing = torch.randn(COLUMNS // 4, COLUMNS, generator=generator)
    x = torch.randn(tokens, COLUMNS // 4, generator=generator) @ mixing
    x += 0.5 * torch.randn(tokens, COLUMNS, generator=generator)
    return weight, InputStatistics.of(x)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["int4", "int3"])
def test_correlated_inputs_cost_the_outputs_far_less(name: str, seed: int) -> None:
    weight, inputs = weight_and_inputs(seed)
    variant = create_variant(name, "cpu", RoundToNearest())
    found = choose_codes(weight, variant, inputs.gram)
    ours = inputs.output_error(found.dequantize() - weight)
    nearest = inputs.output_error(variant.reference(weight) - weight)
    assert ours < 0.5 * nearest


def test_codes_with_integer_zeros() -> None:
    weight, inputs = weight_and_inputs()
    weight = weight.to(torch.bfloat16)
    variant = Int4Marlin(RoundToNearest())
    found = choose_codes(weight, variant, inputs.gram)
    assert isinstance(found, IntegerZeros)
    assert found.scales.dtype == torch.bfloat16
    assert found.scales.shape == (64, COLUMNS // 128)
    nearest = quantize_integer_zeros(weight, 4, 128)
    ours, theirs = (
        inputs.output_error(one.dequantize() - weight.float()) for one in (found, nearest)
    )
    assert ours < 0.5 * theirs


def test_inputs_without_correlation_are_rounded_to_nearest() -> None:
    weight, _ = weight_and_inputs()
    found = choose_codes(weight, int4(), torch.eye(COLUMNS) * 7)
    torch.testing.assert_close(found.dequantize(), int4().reference(weight), rtol=0, atol=1e-6)


def test_the_codes_are_always_the_same() -> None:
    weight, inputs = weight_and_inputs()
    first, again = (choose_codes(weight, int4(), inputs.gram) for _ in range(2))
    assert torch.equal(first.codes, again.codes)
    assert torch.equal(first.scales, again.scales)
    assert torch.equal(first.zeros, again.zeros)


def test_columns_never_reached_are_rounded_to_nearest() -> None:
    weight, inputs = weight_and_inputs()
    gram = inputs.gram.clone()
    dead = [0, 100, COLUMNS - 1]
    gram[dead] = 0
    gram[:, dead] = 0
    found = choose_codes(weight, int4(), gram)
    steps = found.scales.float().repeat_interleave(COLUMNS // found.scales.shape[1], dim=1)
    off = (found.dequantize() - weight).abs()
    assert (off[:, dead] <= 0.51 * steps[:, dead]).all()
    assert (off > 0.51 * steps).any()  # others move further than to the nearest
    whole = choose_codes(weight, int4(), torch.zeros_like(gram))
    torch.testing.assert_close(whole.dequantize(), int4().reference(weight), rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 40])
def test_fewer_tokens_than_columns(tokens: int) -> None:
    weight, inputs = weight_and_inputs(tokens=tokens)
    assert torch.linalg.matrix_rank(inputs.gram) <= tokens
    found = choose_codes(weight, int4(), inputs.gram)
    assert torch.isfinite(found.dequantize()).all()
    ours = inputs.output_error(found.dequantize() - weight)
    assert ours < 0.5 * inputs.output_error(int4().reference(weight) - weight)


def test_the_factor_is_that_of_the_inverse() -> None:
    _, inputs = weight_and_inputs()
    upper = inverse_factor(inputs.gram)
    assert torch.equal(upper, upper.triu())
    damped = inputs.gram.double()
    damped.diagonal().add_(0.01 * damped.diagonal().mean())
    product = (upper.double().t() @ upper.double()) @ damped
    torch.testing.assert_close(product, torch.eye(COLUMNS).double(), rtol=0, atol=1e-2)


def test_a_hessian_that_rounding_made_indefinite_is_damped_more() -> None:
    gram = torch.eye(64)
    gram[0, 0] = -0.05
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.cholesky(gram + 0.01 * torch.eye(64))
    assert torch.isfinite(inverse_factor(gram)).all()


def test_what_is_damaged_is_refused() -> None:
    weight, inputs = weight_and_inputs()
    with pytest.raises(ValueError, match="not finite; the checkpoint is damaged"):
        choose_codes(weight, int4(), inputs.gram * float("nan"))
    weight[3, 5] = float("inf")
    with pytest.raises(ValueError, match="the first at row 3, column 5"):
        choose_codes(weight, int4(), inputs.gram)
    with pytest.raises(ValueError, match="fp8 has no codes for gptq to choose"):
        choose_codes(
            torch.zeros(16, 32), create_variant("fp8", "cpu", RoundToNearest()), inputs.gram
        )


@pytest.mark.parametrize("kv_heads", [MHA, GQA])
@pytest.mark.parametrize("name", ["int4", "int3"])
def test_a_layer_loses_less(kv_heads: int, name: str) -> None:
    layer = random_layer(kv_heads)
    variants = variants_for(name, "cpu", layer.linears)
    adapted = GPTQ.adapt(layer, variants, calibrate(layer))
    assert error(layer, adapted, variants) < 0.8 * error(
        layer, RTN.adapt(layer, variants), variants
    )


@pytest.mark.parametrize("path", LINEARS)
@pytest.mark.parametrize("name", ["int4", "int3"])
def test_the_kernels_compute_with_the_chosen_codes(name: str, path: str) -> None:
    layer = random_layer(GQA)
    variants = variants_for(name, "cpu", layer.linears)
    adapted = GPTQ.adapt(layer, variants, calibrate(layer))
    tensors = adapted.encoded(variants, layer)
    assert not any("layernorm" in tensor for tensor in tensors)
    prefix = f"{path}."
    parts = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    x = torch.randn(3, layer.linears[path].shape[1])
    expected = x @ adapted.rounded(variants)[path].t()
    actual = variants[path].linear(parts, x, None)
    assert (actual - expected).norm() / expected.norm() < 0.01


def test_codes_of_another_kind_are_not_packed() -> None:
    layer = random_layer(GQA)
    variants = variants_for("int4", "cpu", layer.linears)
    adapted = GPTQ.adapt(layer, variants, calibrate(layer))
    wrong = variants_for("fp8", "cpu", layer.linears)
    with pytest.raises(ValueError, match="qkv_proj: fp8 is not packed from QuantizedWeight"):
        adapted.encoded(wrong, layer)


def test_calibration_is_needed() -> None:
    layer = random_layer(GQA)
    variants = variants_for("int4", "cpu", layer.linears)
    with pytest.raises(ValueError, match="gptq needs activations"):
        GPTQ.adapt(layer, variants)
