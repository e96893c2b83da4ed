"""Variants made beforehand, in a real model's layers and through a real backend: what comes with a
variant leaves with it, bit for bit, also where a move fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memory_backends.base import BackendError, TensorMap
from memory_backends.layer_swap import LayerSwapBackend
from sglang_morph.precision.checkpoints.source import CheckpointSource
from sglang_morph.precision.layers import SglangLayer, find_morphable_layers
from sglang_morph.precision.plan import PlanStep
from sglang_morph.precision.quantizers.layer import LayerWeights, variants_for
from sglang_morph.precision.sources import SourceError
from sglang_morph.weights_digest import weights_digest
from tests.memory_backends.fails_once import FailsOnce
from tests.sglang_morph.precision.checkpoint_writer import (
    awq_config,
    awq_linear,
    write_checkpoint,
)
from tests.sglang_morph.precision.test_layers import in_one_buffer, llama, qwen2

pytestmark = pytest.mark.usefixtures("sglang_distributed")

NORMS = ("input_layernorm", "post_attention_layernorm")
NORMED = {"self_attn.qkv_proj": "input_layernorm", "mlp.gate_up_proj": "post_attention_layernorm"}
CLOSE = 0.15
PAGE = 256


class ScaledSource:
    """Layers whose norms were doubled or more, channel by channel, and the weights after them
    divided: `int4` computes what the layer computes only if both are used together."""

    def __init__(self, model: Any, variant: str = "int4") -> None:
        self._variant = variant
        self._layers = [self._make(layer) for layer in model.model.layers]

    def provides(self, layer: int, variant: str) -> bool:
        return variant == self._variant

    def tensors(self, layer: int, variant: str) -> TensorMap | None:
        return self._layers[layer] if self.provides(layer, variant) else None

    def _make(self, layer: Any) -> dict[str, torch.Tensor]:
        paths = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        linears = {path: layer.get_submodule(path).weight.data for path in paths}
        norms = {path: layer.get_submodule(path).weight.data for path in NORMS}
        loaded = LayerWeights(linears, norms)
        scales = 2 + torch.arange(64) % 2
        scaled = LayerWeights(
            {p: w / scales if p in NORMED else w for p, w in linears.items()},
            {path: norm * scales for path, norm in norms.items()},
        )
        return scaled.encoded(variants_for(self._variant, "cpu", linears), loaded)


def build(kind: Callable[[], Any] = llama) -> Any:
    model = kind()
    for layer in model.model.layers:
        for norm in NORMS:
            layer.get_submodule(norm).weight.data.add_(1)
    return model


def outputs(model: Any, index: int) -> torch.Tensor:
    """What the layer's normed linears make of hidden states, with residual addition fused."""
    layer = model.model.layers[index]
    generator = torch.Generator().manual_seed(3)
    found = []
    for path, norm in NORMED.items():
        x, residual = torch.randn(2, 3, 64, generator=generator)
        normed, _ = layer.get_submodule(norm)(x, residual)
        found.append(layer.get_submodule(path)(normed)[0])
    return torch.cat(found, dim=-1)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_norms_come_and_go_with_the_variant() -> None:
    model = build()
    layer = find_morphable_layers(model, ["int4"], source=ScaledSource(model))[0]
    norm = model.model.layers[0].input_layernorm.weight
    address, loaded = norm.data_ptr(), norm.detach().clone()
    full = dict(layer.full_tensors())
    before = outputs(model, 0)

    views = in_one_buffer(layer.variant_tensors("int4", full))
    layer.bind("int4", views)
    assert norm.data_ptr() == views["input_layernorm.weight"].data_ptr()
    assert 0 < error(outputs(model, 0), before) < CLOSE
    views["input_layernorm.weight"].mul_(2)  # read where they lie, at every forward
    assert error(outputs(model, 0), before) > 0.4

    layer.bind("full", full)
    assert norm.data_ptr() == address
    assert torch.equal(norm, loaded)
    assert torch.equal(outputs(model, 0), before)


def test_a_variant_without_norms_gets_the_loaded_ones() -> None:
    model = build()
    layer = find_morphable_layers(model, ["int8", "int4"], source=ScaledSource(model))[0]
    before, full = outputs(model, 0), layer.full_tensors()
    made = {name: layer.variant_tensors(name, full) for name in ("int8", "int4")}
    for name in ("int4", "int8"):
        layer.bind(name, made[name])
        assert error(outputs(model, 0), before) < CLOSE
    norm = model.model.layers[0].input_layernorm.weight
    assert norm.data_ptr() == layer.loaded_tensors()["input_layernorm.weight"].data_ptr()


class FailingLayer(FailsOnce, SglangLayer):
    """Fails once when it is asked to take `fail_on`, after everything has been switched."""


def adopt(model: Any) -> tuple[LayerSwapBackend, list[SglangLayer]]:
    """Layer 0 to int8, layer 1 to int8, layer 0 to int4, layer 1 to int4."""
    layers = find_morphable_layers(model, ["int8", "int4"], source=ScaledSource(model))
    for layer in layers:
        layer.__class__ = FailingLayer
    steps = [PlanStep(layer, variant) for variant in ("int8", "int4") for layer in (0, 1)]
    backend = LayerSwapBackend()
    backend.adopt_weights(layers, steps, torch.device("cpu"))
    backend.allocate(base_pages=4, page_bytes=PAGE)
    return backend, layers


def norms(model: Any) -> list[torch.Tensor]:
    return [layer.get_submodule(n).weight.detach() for layer in model.model.layers for n in NORMS]


def test_a_backend_brings_norms_back_bit_for_bit() -> None:
    model = build()
    digest, addresses = weights_digest(model), [norm.data_ptr() for norm in norms(model)]
    before = [outputs(model, index) for index in (0, 1)]
    backend, _ = adopt(model)
    assert weights_digest(model) == digest
    for depth in (2, 3, 4):
        backend.lower(depth)
        assert all(error(outputs(model, i), before[i]) < CLOSE for i in (0, 1))
    storage = backend.kv_storage
    for norm in norms(model):
        assert storage.data_ptr() <= norm.data_ptr() < storage.data_ptr() + storage.nbytes
    in_slab = [norm.data_ptr() for norm in norms(model)]
    backend.restore(0)
    assert weights_digest(model) == digest
    assert [norm.data_ptr() for norm in norms(model)] == addresses
    backend.lower(4)
    assert [norm.data_ptr() for norm in norms(model)] == in_slab  # CUDA graphs hold addresses
    backend.restore(0)
    assert weights_digest(model) == digest


@pytest.mark.parametrize("began", [0, 2])
def test_a_failed_downshift_leaves_every_norm_as_it_was(began: int) -> None:
    model = build()
    backend, layers = adopt(model)
    digest = weights_digest(model)
    if began:
        backend.lower(began)
    addresses = [norm.data_ptr() for norm in norms(model)]
    before = [outputs(model, index) for index in (0, 1)]
    layers[1].fail_on = "int4"
    with pytest.raises(BackendError, match="lowering layer 1 failed: no luck"):
        backend.lower(4)
    assert backend.depth == began
    assert [norm.data_ptr() for norm in norms(model)] == addresses
    assert all(torch.equal(outputs(model, i), before[i]) for i in (0, 1))
    backend.lower(4)
    backend.restore(0)
    assert weights_digest(model) == digest


def test_a_failed_restore_keeps_the_variant_with_its_norms() -> None:
    model = build()
    backend, layers = adopt(model)
    digest = weights_digest(model)
    backend.lower(4)
    before = outputs(model, 1)
    layers[1].fail_on = "int8"
    with pytest.raises(BackendError, match="restoring layer 1 failed: no luck"):
        backend.restore(0)
    assert backend.depth == 4
    assert torch.equal(outputs(model, 1), before)
    backend.restore(0)
    assert weights_digest(model) == digest


class Given:
    """A source with the tensors it is told."""

    def __init__(self, tensors: TensorMap) -> None:
        self._tensors = tensors

    def provides(self, layer: int, variant: str) -> bool:
        return True

    def tensors(self, layer: int, variant: str) -> TensorMap | None:
        return self._tensors


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("input_layernorm.weight", torch.ones(63), r"layer 0 in int4: input_layernorm.*\[63\]"),
        ("mlp.experts.codes", torch.ones(3), r"tensors of mlp\.experts are missing or not known"),
        ("mlp.down_proj", None, r"tensors of mlp\.down_proj are missing or not known"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, tensor: torch.Tensor | None, message: str
) -> None:
    model = build()
    made = dict(ScaledSource(model).tensors(0, "int4") or {})
    if tensor is None:
        made = {key: part for key, part in made.items() if not key.startswith(name)}
    else:
        made[name] = tensor
    layer = find_morphable_layers(model, ["int4"], source=Given(made))[0]
    with pytest.raises(SourceError, match=message):
        layer.variant_tensors("int4", layer.full_tensors())


def test_norms_take_the_dtype_of_those_they_replace() -> None:
    model = build()
    made = {k: t.double() if "norm" in k else t for k, t in _int4(model).items()}
    layer = find_morphable_layers(model, ["int4"], source=Given(made))[0]
    tensors = layer.variant_tensors("int4", layer.full_tensors())
    assert tensors["input_layernorm.weight"].dtype == torch.float32


def _int4(model: Any) -> TensorMap:
    return ScaledSource(model).tensors(0, "int4") or {}


def test_biases_can_come_with_a_variant() -> None:
    model = build(qwen2)
    bias = model.model.layers[0].self_attn.qkv_proj.bias
    loaded = bias.detach().clone()
    made = {**_int4(model), "self_attn.qkv_proj.bias": loaded + 1}
    layer = find_morphable_layers(model, ["int4"], source=Given(made))[0]
    full = dict(layer.full_tensors())
    layer.bind("int4", layer.variant_tensors("int4", full))
    assert torch.equal(bias, loaded + 1)
    layer.bind("full", full)
    assert torch.equal(bias, loaded)


def test_what_is_provided_is_not_derived_on_the_device() -> None:
    model = build()
    layer = find_morphable_layers(model, ["fp8", "int4"], source=ScaledSource(model, "fp8"))[0]
    assert not layer.is_derived("fp8")
    plain = find_morphable_layers(model, ["fp8", "int4"], source=ScaledSource(model))[0]
    assert plain.is_derived("fp8")


def unfused(model: Any) -> dict[str, torch.Tensor]:
    """The decoder layers' weights under the names of a checkpoint; norms doubled and the weights
    after them halved, as AWQ would."""
    tensors = {}
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}."
        q, k, v = (layer.self_attn.qkv_proj.weight / 2).split((64, 32, 32))
        gate, up = (layer.mlp.gate_up_proj.weight / 2).split(96)
        attention = {"q": q, "k": k, "v": v, "o": layer.self_attn.o_proj.weight}
        mlp = {"gate": gate, "up": up, "down": layer.mlp.down_proj.weight}
        tensors |= {f"{prefix}self_attn.{x}_proj.weight": w for x, w in attention.items()}
        tensors |= {f"{prefix}mlp.{x}_proj.weight": w for x, w in mlp.items()}
        tensors |= {f"{prefix}{n}.weight": layer.get_submodule(n).weight * 2 for n in NORMS}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def test_a_checkpoint_through_a_backend(tmp_path: Path) -> None:
    model = build()
    write_checkpoint(tmp_path, unfused(model), {}, awq_config(32), awq_linear(32))
    made = CheckpointSource(tmp_path, "cpu", torch.float16)
    layers = find_morphable_layers(model, ["int4"], source=made)
    made.compare_with(lambda index: layers[index].loaded_tensors())
    digest, before = weights_digest(model), [outputs(model, index) for index in (0, 1)]
    backend = LayerSwapBackend()
    backend.adopt_weights(layers, [PlanStep(i, "int4") for i in (0, 1)], torch.device("cpu"))
    backend.allocate(base_pages=4, page_bytes=PAGE)
    backend.lower(2)
    for index in (0, 1):
        norm = model.model.layers[index].input_layernorm.weight
        doubled = layers[index].loaded_tensors()["input_layernorm.weight"] * 2
        assert torch.equal(norm, doubled.half().float())
        assert 0 < error(outputs(model, index), before[index]) < CLOSE
    backend.restore(0)
    assert weights_digest(model) == digest


def test_a_checkpoint_of_other_weights_is_refused_by_the_backend(tmp_path: Path) -> None:
    model = build()
    other = {name: tensor.roll(1, 0) for name, tensor in unfused(model).items()}
    write_checkpoint(tmp_path, other, {}, awq_config(32), awq_linear(32))
    made = CheckpointSource(tmp_path, "cpu", torch.float16)
    layers = find_morphable_layers(model, ["int4"], source=made)
    made.compare_with(lambda index: layers[index].loaded_tensors())
    with pytest.raises(SourceError, match=r"layer 0, self_attn\.qkv_proj: .* not that of this"):
        LayerSwapBackend().adopt_weights(layers, [PlanStep(0, "int4")], torch.device("cpu"))
