"""The decoder layers of a SGLang model, as a memory backend wants to see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.utils import use_intel_amx_backend

from memory_backends.base import TensorMap
from sglang_morph.precision.linear_method import VariantLinearMethod
from sglang_morph.precision.names import FULL
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.variants.base import Variant
from sglang_morph.precision.variants.registry import create_variant, default_variants

MORPHABLE_LINEARS = (
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
)
"""Paths inside a decoder layer of Llama, Mistral, Qwen2 and Qwen3, in slab order."""


class UnsupportedModel(ValueError):
    """Layers that can't be morphed. One line naming the layer, the linear and the reason."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear of the model and the method it was loaded with."""

    module: LinearBase
    weight: torch.nn.Parameter
    method: LinearMethodBase


class SglangLayer:
    """A `MorphableLayer` over the linears of one decoder layer. Biases stay where they are."""

    def __init__(
        self, index: int, linears: Mapping[str, _Linear], variants: Mapping[str, Variant]
    ) -> None:
        self.index = index
        self._linears = linears
        self._variants = variants

    def full_tensors(self) -> TensorMap:
        """`<path>.weight` -> the weight, `[N, K]`, where it lies now."""
        return {f"{path}.weight": linear.weight.data for path, linear in self._linears.items()}

    def variant_tensors(self, variant: str, full: TensorMap) -> TensorMap:
        """`<path>.<part>` -> the parts of `variant`, on the host, made from `full` (any device).

        Raises ValueError, naming it, where a weight is damaged, and KeyError for a variant that
        was not asked for.
        """
        encoder = self._variants[variant]
        return {
            f"{path}.{part}": tensor
            for path in self._linears
            for part, tensor in self._encode(encoder, path, full).items()
        }

    def bind(self, variant: str, tensors: TensorMap) -> None:
        """Compute with `variant` over `tensors`: references are switched, nothing is copied.

        Under a variant `weight.data` stays the view it was, and its bytes mean nothing.
        """
        if variant == FULL:
            self._bind_full(tensors)
        else:
            self._bind_variant(self._variants[variant], tensors)

    def _encode(self, encoder: Variant, path: str, full: TensorMap) -> dict[str, torch.Tensor]:
        try:
            return encoder.encode(full[f"{path}.weight"])
        except ValueError as error:
            raise ValueError(f"layer {self.index}, {path}: {error}") from error

    def _bind_full(self, tensors: TensorMap) -> None:
        for path, linear in self._linears.items():
            linear.weight.data = tensors[f"{path}.weight"]
            linear.module.quant_method = linear.method

    def _bind_variant(self, variant: Variant, tensors: TensorMap) -> None:
        parts: dict[str, dict[str, torch.Tensor]] = {path: {} for path in self._linears}
        for name, tensor in tensors.items():
            path, _, part = name.rpartition(".")
            parts[path][part] = tensor
        for path, linear in self._linears.items():
            linear.module.quant_method = VariantLinearMethod(variant, parts[path])


def find_morphable_layers(
    model: torch.nn.Module, variants: Sequence[str] | None = None, quantizer: str = "rtn"
) -> list[SglangLayer]:
    """Every decoder layer of `model`, in order, ready for `variants` (None: the device's default).

    Raises `UnsupportedModel` unless all their linears are plain and take every variant; ValueError
    for an unknown variant or quantizer.
    """
    decoder = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(decoder, torch.nn.ModuleList) or not decoder:
        raise UnsupportedModel(
            f"{type(model).__name__} has no `model.layers`; serve it with --memory-backend static"
        )
    linears = [_find_linears(index, layer) for index, layer in enumerate(decoder)]
    device = linears[0][MORPHABLE_LINEARS[0]].weight.device.type
    names = default_variants(device) if variants is None else variants
    encoders = {name: create_variant(name, device, create_quantizer(quantizer)) for name in names}
    for index, found in enumerate(linears):
        _check_shapes(index, found, encoders)
    return [SglangLayer(index, found, encoders) for index, found in enumerate(linears)]


def _find_linears(index: int, layer: torch.nn.Module) -> dict[str, _Linear]:
    return {path: _find_linear(index, layer, path) for path in MORPHABLE_LINEARS}


def _find_linear(index: int, layer: torch.nn.Module, path: str) -> _Linear:
    try:
        module = layer.get_submodule(path)
    except AttributeError:
        raise _unsupported(index, path, "there is no such linear") from None
    if not isinstance(module, LinearBase):
        raise _unsupported(index, path, f"it is a {type(module).__name__}, not a plain linear")
    method = module.quant_method
    if not isinstance(method, UnquantizedLinearMethod):
        raise _unsupported(index, path, f"it is quantized already ({type(method).__name__})")
    if use_intel_amx_backend(module):
        raise _unsupported(index, path, "its weight is packed for Intel AMX")
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.nn.Parameter):
        raise _unsupported(index, path, "it has no weight")
    if weight.ndim != 2 or not weight.is_contiguous():
        raise _unsupported(index, path, "its weight is not a contiguous matrix")
    return _Linear(module, weight, method)


def _check_shapes(
    index: int, linears: Mapping[str, _Linear], variants: Mapping[str, Variant]
) -> None:
    for path, linear in linears.items():
        for variant in variants.values():
            rows, columns = linear.weight.shape
            if reason := variant.supports(rows, columns):
                raise _unsupported(index, path, reason)


def _unsupported(index: int, path: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"layer {index}, {path}: {reason}; serve this model with --memory-backend static"
    )
