from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from sglang_morph.precision.layers import (
    SglangLayer,
    UnfitWeight,
    UnsupportedModel,
    find_morphable_layers,
)
from sglang_morph.precision.linear_method import VariantLinearMethod
from sglang_morph.precision.names import MORPHABLE_LINEARS
from sglang_morph.precision.variants.int4_cpu import Int4Cpu
from sglang_morph.precision.variants.preflight import WrongKernel

pytestmark = pytest.mark.usefixtures("sglang_distributed")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def fill(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.1, generator=generator)
    return model


def llama(**changes: int) -> Any:
    from sglang.srt.models.llama import LlamaForCausalLM
    from transformers import LlamaConfig

    return fill(LlamaForCausalLM(LlamaConfig(**SIZES | changes)))


def qwen2() -> Any:
    from sglang.srt.models.qwen2 import Qwen2ForCausalLM
    from transformers import Qwen2Config

    return fill(Qwen2ForCausalLM(Qwen2Config(**SIZES)))


def qwen3() -> Any:
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM
    from transformers import Qwen3Config

    return fill(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)))


def mistral() -> Any:
    from sglang.srt.models.mistral import MistralForCausalLM
    from transformers import MistralConfig

    return fill(MistralForCausalLM(MistralConfig(**SIZES, head_dim=16)))


def in_one_buffer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of `tensors` as views of one byte buffer, as in a slab."""
    starts, size = [], 0
    for tensor in tensors.values():
        starts.append(size)
        size += -(-tensor.nbytes // 256) * 256
    slab = torch.empty(size, dtype=torch.uint8)
    return {
        name: slab[start : start + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
        for start, (name, t) in zip(starts, tensors.items(), strict=True)
    }


def outputs(model: Any, index: int) -> dict[str, torch.Tensor]:
    """What each morphable linear of a layer computes, called as the model calls it."""
    layer = model.model.layers[index]
    found = {}
    for path in MORPHABLE_LINEARS:
        module = layer.get_submodule(path)
        x = torch.randn(3, module.input_size, generator=torch.Generator().manual_seed(7))
        found[path], _ = module(x)
    return found


@pytest.mark.parametrize("build", [llama, mistral, qwen2, qwen3])
def test_supported_models(build: Callable[[], Any]) -> None:
    model = build()
    layers = find_morphable_layers(model)
    assert [layer.index for layer in layers] == [0, 1]
    assert {name: tuple(t.shape) for name, t in layers[0].full_tensors().items()} == {
        "self_attn.qkv_proj.weight": (128, 64),
        "self_attn.o_proj.weight": (64, 64),
        "mlp.gate_up_proj.weight": (192, 64),
        "mlp.down_proj.weight": (64, 96),
    }
    for variant in ("int8", "int4"):
        parts = layers[1].variant_tensors(variant, layers[1].full_tensors())
        layers[1].bind(variant, parts)
        assert torch.isfinite(torch.cat([y.flatten() for y in outputs(model, 1).values()])).all()


def test_full_tensors_are_the_parameters() -> None:
    model = llama()
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    first = find_morphable_layers(model)[0].full_tensors()["self_attn.qkv_proj.weight"]
    assert first.data_ptr() == weight.data_ptr()


def test_preflight_tries_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = find_morphable_layers(llama())[1]
    layer.preflight()
    compute = Int4Cpu.linear
    monkeypatch.setattr(Int4Cpu, "linear", lambda *args: compute(*args) * 1.5)
    with pytest.raises(WrongKernel, match=r"layer 1, self_attn.qkv_proj: .*off by 0.5"):
        layer.preflight()


@pytest.mark.parametrize("variant", ["int8", "int4"])
def test_down_and_back(variant: str) -> None:
    """The path a backend takes: host copy, device memory gone, variant in a slab, full again."""
    model = llama()
    layer = find_morphable_layers(model)[0]
    untouched = outputs(model, 1)
    before = outputs(model, 0)
    methods = [m.quant_method for m in model.model.layers[0].modules() if _has_method(m)]
    host = {name: tensor.clone() for name, tensor in layer.full_tensors().items()}
    nowhere = {n: torch.zeros(1).expand(t.shape) for n, t in host.items()}
    layer.bind("full", nowhere)

    layer.bind(variant, in_one_buffer(layer.variant_tensors(variant, host)))
    lowered = outputs(model, 0)
    for path, y in before.items():
        error = (lowered[path] - y).norm() / y.norm()
        assert 0 < error < {"int8": 0.02, "int4": 0.15}[variant]
    assert all(torch.equal(y, untouched[path]) for path, y in outputs(model, 1).items())

    back = in_one_buffer(host)
    layer.bind("full", back)
    assert all(torch.equal(y, before[path]) for path, y in outputs(model, 0).items())
    weight = model.model.layers[0].mlp.down_proj.weight
    assert weight.data_ptr() == back["mlp.down_proj.weight"].data_ptr()
    after = [m.quant_method for m in model.model.layers[0].modules() if _has_method(m)]
    assert all(old is new for old, new in zip(methods, after, strict=True))


def test_bind_reads_the_views_it_is_given() -> None:
    model = llama()
    layer = find_morphable_layers(model, ["int8"])[0]
    views = in_one_buffer(layer.variant_tensors("int8", layer.full_tensors()))
    layer.bind("int8", views)
    views["mlp.down_proj.codes"].zero_()
    views["mlp.down_proj.offsets"].zero_()
    assert (outputs(model, 0)["mlp.down_proj"] == 0).all()
    assert isinstance(model.model.layers[0].mlp.down_proj.quant_method, VariantLinearMethod)


def test_biases_stay_outside_the_slab() -> None:
    model = qwen2()
    layer = find_morphable_layers(model, ["int8"])[0]
    qkv = model.model.layers[0].self_attn.qkv_proj
    full = layer.full_tensors()
    assert not any("bias" in name for name in full)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected = linear(x, qkv.weight, qkv.bias)
    layer.bind("int8", layer.variant_tensors("int8", full))
    assert (qkv(x)[0] - expected).norm() / expected.norm() < 0.02
    assert (qkv(x)[0] - linear(x, qkv.weight)).norm() / expected.norm() > 0.05


def test_a_damaged_weight_is_refused() -> None:
    model = llama()
    model.model.layers[0].mlp.down_proj.weight.data[3, 5] = torch.nan
    layer = find_morphable_layers(model)[0]
    for find_out in (layer.preflight, lambda: layer.variant_tensors("int8", layer.full_tensors())):
        with pytest.raises(UnfitWeight, match=r"layer 0, mlp\.down_proj.*row 3, column 5"):
            find_out()


def _break_by_removal(model: Any) -> None:
    del model.model.layers[1].mlp.gate_up_proj


def _break_by_type(model: Any) -> None:
    model.model.layers[1].mlp.gate_up_proj = torch.nn.Linear(64, 192)


def _break_by_quantization(model: Any) -> None:
    [first, second] = find_morphable_layers(model, ["int8"])
    second.bind("int8", second.variant_tensors("int8", first.full_tensors()))


def _break_by_stride(model: Any) -> None:
    weight = model.model.layers[1].mlp.gate_up_proj.weight
    weight.data = weight.data.t().contiguous().t()


def _break_by_amx(model: Any) -> None:
    model.model.layers[1].mlp.gate_up_proj.use_intel_amx_backend = True


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_break_by_removal, r"layer 1, mlp\.gate_up_proj: there is no such linear"),
        (_break_by_type, r"layer 1, mlp\.gate_up_proj: it is a Linear"),
        (_break_by_quantization, r"layer 1, self_attn\.qkv_proj: it is quantized"),
        (_break_by_stride, r"layer 1, mlp\.gate_up_proj: .*contiguous"),
        (_break_by_amx, r"layer 1, mlp\.gate_up_proj: .*AMX"),
    ],
)
def test_layers_that_cannot_be_morphed(damage: Callable[[Any], None], message: str) -> None:
    model = llama()
    damage(model)
    with pytest.raises(UnsupportedModel, match=message) as caught:
        find_morphable_layers(model)
    assert "--memory-backend static" in str(caught.value)


def test_shapes_no_kernel_takes() -> None:
    model = llama(intermediate_size=40)
    message = r"layer 0, mlp\.down_proj: int8 on the CPU needs K divisible by 16, not 40"
    with pytest.raises(UnsupportedModel, match=message):
        find_morphable_layers(model, ["int8"])


def test_models_without_decoder_layers() -> None:
    with pytest.raises(UnsupportedModel, match=r"Linear has no `model\.layers`"):
        find_morphable_layers(torch.nn.Linear(2, 2))


def test_unknown_variants_and_quantizers() -> None:
    with pytest.raises(ValueError, match="'int2' does not exist"):
        find_morphable_layers(llama(), ["int2"])
    with pytest.raises(ValueError, match="unknown quantizer"):
        find_morphable_layers(llama(), quantizer="best")


def test_the_layer_is_what_backends_expect() -> None:
    from memory_backends.base import MorphableLayer

    layer: MorphableLayer = find_morphable_layers(llama())[0]
    assert isinstance(layer, SglangLayer)


def _has_method(module: torch.nn.Module) -> bool:
    return getattr(module, "quant_method", None) is not None
