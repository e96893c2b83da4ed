from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

from sglang_morph.precision.quantizers.awq import (
    scale_inputs,
    search_clipping,
    search_scales,
)
from sglang_morph.precision.quantizers.layer import LayerWeights, Variants, variants_for
from sglang_morph.precision.quantizers.registry import create_layer_quantizer
from sglang_morph.precision.quantizers.statistics import InputStatistics, statistics_of
from tests.sglang_morph.precision.toy_layer import (
    INNER,
    LINEARS,
    random_hidden,
    random_layer,
    run,
    unrounded,
)

AWQ, RTN = create_layer_quantizer("awq"), create_layer_quantizer("rtn")
MHA, GQA = 4, 2


def calibrate(layer: LayerWeights) -> dict[str, InputStatistics]:
    return statistics_of(run(unrounded(layer), random_hidden())[1])


def int4(layer: LayerWeights) -> Variants:
    return variants_for("int4", "cpu", layer.linears)


def error(layer: LayerWeights, adapted: LayerWeights, variants: Variants) -> float:
    """Of the layer's output, relative, once `adapted` is rounded."""
    expected = run(unrounded(layer), random_hidden())[0] - random_hidden()
    actual = run(adapted.rounded(variants), random_hidden())[0] - random_hidden()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("path", LINEARS)
def test_scaling_leaves_the_function_as_it_was(path: str) -> None:
    layer = random_layer(MHA)
    columns = layer.linears[path].shape[1]
    scales = torch.rand(columns, generator=torch.Generator().manual_seed(1)) * 4 + 0.25
    scaled, used = scale_inputs(layer, path, scales)
    torch.testing.assert_close(used, scales, rtol=1e-5, atol=0)
    torch.testing.assert_close(scaled.linears[path], layer.linears[path] * scales)
    expected, read = run(unrounded(layer), random_hidden())
    actual, read_now = run(unrounded(scaled), random_hidden())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(read_now[path], read[path] / scales, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_rounding_of_a_norm_is_made_up_for(dtype: torch.dtype) -> None:
    """Norm times weight is what the layer computes with."""
    layer = random_layer(MHA, dtype)
    path, norm = "mlp.gate_up_proj", "post_attention_layernorm"
    scales = torch.rand(layer.linears[path].shape[1]) * 4 + 0.25
    scaled, used = scale_inputs(layer, path, scales)
    assert scaled.norms[norm].dtype == scaled.linears[path].dtype == dtype
    torch.testing.assert_close(scaled.norms[norm].float() * used, layer.norms[norm].float())


def test_dead_channels_stay_dead() -> None:
    layer = random_layer(MHA)
    layer.norms["input_layernorm"][5] = 0
    scaled, _ = scale_inputs(layer, "self_attn.qkv_proj", torch.full((64,), 3.0))
    assert scaled.norms["input_layernorm"][5] == 0
    assert torch.isfinite(scaled.linears["self_attn.qkv_proj"]).all()


@pytest.mark.parametrize("kv_heads", [MHA, GQA])
@pytest.mark.parametrize("name", ["int4", "int3"])
def test_rounding_costs_less_than_without(kv_heads: int, name: str) -> None:
    layer = random_layer(kv_heads)
    inputs, variants = calibrate(layer), variants_for(name, "cpu", layer.linears)
    adapted = AWQ.adapt(layer, variants, inputs)
    plain = RTN.adapt(layer, variants)
    assert error(layer, adapted, variants) < 0.75 * error(layer, plain, variants)
    for path, weight in layer.linears.items():
        assert adapted.linears[path].shape == weight.shape
        assert adapted.linears[path].dtype == weight.dtype


def test_values_are_scaled_only_where_each_head_has_its_own() -> None:
    for kv_heads, fixed, scaled in (
        (MHA, frozenset(), True),
        (MHA, frozenset({"self_attn.qkv_proj"}), False),
        (GQA, frozenset(), False),
    ):
        layer = replace(random_layer(kv_heads), fixed_rows=fixed)
        adapted = AWQ.adapt(layer, int4(layer), calibrate(layer))
        # Clipping only ever makes a column smaller.
        before, after = (x.linears["self_attn.o_proj"].norm(dim=0) for x in (layer, adapted))
        assert bool((after > before * 1.01).any()) is scaled


def test_norms_that_must_stay_are_left() -> None:
    layer = replace(random_layer(GQA), norms={})
    inputs = calibrate(random_layer(GQA))
    adapted = AWQ.adapt(layer, int4(layer), inputs)
    assert not adapted.norms
    # The rows of gate: those of up make up for the scaling of down's inputs.
    weight, clipped = (x.linears["mlp.gate_up_proj"][:INNER] for x in (layer, adapted))
    assert (clipped.abs() <= weight.abs()).all()


def test_scales_follow_the_activations() -> None:
    layer = random_layer(MHA)
    path = "self_attn.qkv_proj"
    inputs = calibrate(layer)[path]
    scales = search_scales(layer.linears[path], int4(layer)[path], inputs)
    assert scales[::16].min() > scales[1:16].max()


def test_scales_of_channels_never_seen_are_finite() -> None:
    layer = random_layer(MHA)
    path = "self_attn.qkv_proj"
    x = random_hidden()
    x[:, 3] = 0
    for seen in (x, torch.zeros_like(x)):
        scales = search_scales(layer.linears[path], int4(layer)[path], InputStatistics.of(seen))
        assert torch.isfinite(scales).all() and (scales > 0).all()


def test_clipping_lets_go_of_far_weights_that_hardly_matter() -> None:
    layer = random_layer(MHA)
    path = "mlp.down_proj"
    weight, variant, inputs = layer.linears[path], int4(layer)[path], calibrate(layer)[path]
    weight[:, 0] = 1.5
    inputs = inputs.scaled(torch.where(torch.arange(96) == 0, 50.0, 1.0))
    clipped = search_clipping(weight, variant, inputs)
    before, after = (inputs.output_error(variant.reference(w) - weight) for w in (weight, clipped))
    assert after < before / 2
    assert (clipped[:, 0] < 1.5).float().mean() > 0.8
    assert torch.equal(clipped[:, 64:].abs().minimum(weight[:, 64:].abs()), clipped[:, 64:].abs())


def test_queries_and_keys_are_not_clipped() -> None:
    layer = replace(random_layer(GQA), norms={})
    adapted = AWQ.adapt(layer, int4(layer), calibrate(random_layer(GQA)))
    weight, clipped = (x.linears["self_attn.qkv_proj"] for x in (layer, adapted))
    values = GQA * 16
    assert torch.equal(clipped[:-values], weight[:-values])
    assert not torch.equal(clipped[-values:], weight[-values:])


def test_only_norms_that_changed_are_given_out() -> None:
    layer = random_layer(GQA)
    variants, inputs = int4(layer), calibrate(layer)
    adapted = AWQ.adapt(layer, variants, inputs)
    tensors = adapted.encoded(variants, layer)
    assert tensors["input_layernorm.weight"].equal(adapted.norms["input_layernorm"])
    assert not any("layernorm" in name for name in layer.encoded(variants, layer))
    parts = {name.rpartition(".")[2]: t for name, t in tensors.items() if "down_proj" in name}
    x = torch.randn(3, 96)
    expected = linear(x, adapted.rounded(variants)["mlp.down_proj"])
    actual = variants["mlp.down_proj"].linear(parts, x, None)
    assert (actual - expected).norm() / expected.norm() < 0.01


def test_calibration_is_needed() -> None:
    layer = random_layer(GQA)
    with pytest.raises(ValueError, match="needs activations"):
        AWQ.adapt(layer, int4(layer))
    with pytest.raises(ValueError, match="unknown quantizer 'best'; known are awq, gptq, rtn"):
        create_layer_quantizer("best")


def test_statistics_add_up() -> None:
    x = random_hidden()
    parts = InputStatistics.of(x[:30]) + InputStatistics.of(x[30:].view(3, 22, 64))
    whole = InputStatistics.of(x)
    assert parts.tokens == whole.tokens == 96
    torch.testing.assert_close(parts.gram, whole.gram, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(parts.mean_magnitude, x.abs().mean(0))
    difference = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    direct = linear(x, difference).square().sum(-1).mean()
    assert whole.output_error(difference) == pytest.approx(float(direct), rel=1e-4)
    scaled, again = whole.scaled(torch.full((64,), 2.0)), InputStatistics.of(x / 2)
    torch.testing.assert_close(scaled.gram, again.gram, rtol=1e-4, atol=1e-2)
    blocks = whole.gram_blocks(16)
    torch.testing.assert_close(blocks[2], whole.gram[32:48, 32:48])
