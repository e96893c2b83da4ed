"""Layers of SGLang that compute at full precision from two halves, with its own linears."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memory_backends.base import FULL, TensorMap
from sglang_morph.precision.layers import SglangLayer, find_morphable_layers
from sglang_morph.precision.linear_method import MergedLinearMethod
from sglang_morph.precision.names import MORPHABLE_LINEARS
from sglang_morph.weights_digest import weights_digest
from tests.sglang_morph.precision.test_layers import llama, outputs, qwen2

pytestmark = pytest.mark.usefixtures("sglang_distributed")

NESTED = "nested_fp8"
LOADED = [torch.float16, torch.bfloat16]


def loaded_from(model: Any, dtype: torch.dtype) -> Any:
    """With weights that a checkpoint of `dtype` could hold, exceptions among them."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.to(dtype).float())
    model.model.layers[0].mlp.down_proj.weight.data[:3, 5] = torch.tensor(3.3e-7).to(dtype).float()
    return model


def merged(layer: SglangLayer) -> tuple[TensorMap, TensorMap]:
    """Bind it as a backend does; the upper halves and the residual."""
    full = {name: tensor.clone() for name, tensor in layer.full_tensors().items()}
    upper = layer.variant_tensors(NESTED, full)
    residual = layer.residual_tensors(NESTED, full)
    scratch = torch.full((max(t.nbytes for t in full.values()),), 0xFF, dtype=torch.uint8)
    for tensor in layer.full_tensors().values():
        tensor.fill_(torch.nan)
    layer.bind_merged(NESTED, upper, residual, scratch)
    return upper, residual


@pytest.mark.parametrize("dtype", LOADED, ids=str)
@pytest.mark.parametrize("build", [llama, qwen2])
def test_results_and_digest_equal_those_of_the_loaded_layer(build: Any, dtype: torch.dtype) -> None:
    model = loaded_from(build(), dtype)
    before, digest = outputs(model, 0), weights_digest(model)
    layer = find_morphable_layers(model, [NESTED])[0]
    assert layer.is_lossless(NESTED)
    _, residual = merged(layer)
    has_exceptions = "mlp.down_proj.exception_index" in residual
    assert has_exceptions == (dtype is torch.bfloat16)
    for path, y in outputs(model, 0).items():
        assert torch.equal(y, before[path]), path
    assert weights_digest(model) == digest


def test_down_and_back() -> None:
    model = loaded_from(llama(), torch.float16)
    before, digest = outputs(model, 0), weights_digest(model)
    layer = find_morphable_layers(model, [NESTED])[0]
    upper, residual = merged(layer)
    layer.bind(NESTED, upper)
    for path, y in outputs(model, 0).items():
        error = (y - before[path]).norm() / before[path].norm()
        assert 0 < error < 0.05, path
    assert weights_digest(model) != digest
    layer.bind_merged(NESTED, upper, residual, torch.zeros(1 << 16, dtype=torch.uint8))
    assert all(torch.equal(y, before[path]) for path, y in outputs(model, 0).items())
    assert weights_digest(model) == digest


def test_scratch_is_shared_and_nothing_else_is_taken() -> None:
    model = loaded_from(llama(), torch.float16)
    scratch = torch.zeros(192 * 64 * 4, dtype=torch.uint8)
    for layer in find_morphable_layers(model, [NESTED]):
        full = dict(layer.full_tensors())
        upper, residual = layer.variant_tensors(NESTED, full), layer.residual_tensors(NESTED, full)
        layer.bind_merged(NESTED, upper, residual, scratch)
        for path in MORPHABLE_LINEARS:
            module = model.model.layers[layer.index].get_submodule(path)
            assert isinstance(module.quant_method, MergedLinearMethod)
            assert module.weight.data_ptr() == scratch.data_ptr()
            module.quant_method.apply(module, torch.zeros(1, module.weight.shape[1]))
            assert torch.equal(module.weight, full[f"{path}.weight"])


def test_a_weight_is_rebuilt_without_touching_what_a_forward_uses() -> None:
    model = loaded_from(llama(), torch.bfloat16)
    layer = find_morphable_layers(model, [NESTED])[0]
    full = {name: tensor.clone() for name, tensor in layer.full_tensors().items()}
    merged(layer)
    for path in MORPHABLE_LINEARS:
        module = model.model.layers[0].get_submodule(path)
        module.weight.fill_(7)
        assert torch.equal(module.quant_method.rebuild(), full[f"{path}.weight"])
        assert (module.weight == 7).all()


def test_the_layer_says_how_much_scratch_it_needs() -> None:
    layer = find_morphable_layers(loaded_from(llama(), torch.float16), [NESTED])[0]
    assert layer.prepare_merged(NESTED) == max(t.nbytes for t in layer.full_tensors().values())


def test_a_layer_with_one_linear_that_cannot_be_nested_is_not_lossless() -> None:
    model = loaded_from(llama(), torch.float16)
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = 61440.0
    first, second = find_morphable_layers(model, [NESTED])
    assert first.is_lossless(NESTED) and not second.is_lossless(NESTED)
    assert first.full_tensors().keys() == second.full_tensors().keys()
    assert FULL not in first.kernels
