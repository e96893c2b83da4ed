"""The decoder layers of a SGLang model, as a memory backend wants to see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.utils import use_intel_amx_backend

from memory_backends.base import TensorMap
from sglang_morph.precision.linear_method import MergedLinearMethod, VariantLinearMethod
from sglang_morph.precision.names import FULL, MORPHABLE_LINEARS
from sglang_morph.precision.quantizers.registry import create_quantizer
from sglang_morph.precision.sources import SourceError, VariantSource
from sglang_morph.precision.variants.base import (
    DerivedVariant,
    Halves,
    NestedVariant,
    Variant,
    rebuild_in_blocks,
)
from sglang_morph.precision.variants.preflight import preflight
from sglang_morph.precision.variants.registry import create_variant, default_variants

REPLACEABLE_PARAMETERS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.qkv_proj.bias",
)
"""Parameters beside the linears' weights that a variant may bring its own of: AWQ scales what a
linear reads, and makes up for it in what comes before."""

_V = TypeVar("_V", bound=Variant)


class UnfitWeight(ValueError):
    """A weight that a variant cannot be made from: damaged, or of a shape its kernel has not."""


class UnsupportedModel(ValueError):
    """Layers that can't be morphed. One line naming the layer, the linear and the reason."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear of the model and the method it was loaded with."""

    module: LinearBase
    weight: torch.nn.Parameter
    method: LinearMethodBase


class _Replaceable:
    """A small parameter that stays where it was loaded; a variant may lend it other bytes."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.loaded = parameter.data
        self._parameter = parameter

    def use(self, data: torch.Tensor | None) -> None:
        """Read `data` from now on; None: what was loaded."""
        self._parameter.data = self.loaded if data is None else data


class SglangLayer:
    """A `MorphableLayer` over the linears of one decoder layer.

    Tensors are named `<path>.weight`, and `<path>.<part>` for a variant's parts and residuals.
    Norms and biases are not morphable: they stay on the device, outside the slab. A variant from a
    `source` may bring its own under the names of `REPLACEABLE_PARAMETERS`, in the slab; which ones
    are read is switched with the variant.
    """

    def __init__(
        self,
        index: int,
        linears: Mapping[str, _Linear],
        variants: Mapping[str, Mapping[str, Variant]],
        replaceable: Mapping[str, _Replaceable] | None = None,
        source: VariantSource | None = None,
    ) -> None:
        """`variants`: name -> linear's path -> what computes it there. `source` goes before them:
        what it provides is not quantized here."""
        self.index = index
        self._linears = linears
        self._variants = variants
        self._replaceable = replaceable or {}
        self._source = source

    @property
    def kernels(self) -> dict[str, dict[str, str]]:
        """Variant -> linear's path -> what computes it, for logs and the status."""
        return {
            name: {path: variant.kernel for path, variant in per_linear.items()}
            for name, per_linear in self._variants.items()
        }

    def preflight(self) -> None:
        """Try every variant's kernel on the layer's own weights, where they lie now.

        Of a variant that the source provides only the first layer's, quantized for the purpose.

        Raises `WrongKernel` or `UnfitWeight`, naming layer and linear. Waits for the device.
        """
        for name, per_linear in self._variants.items():
            if self.index and self._source and self._source.provides(self.index, name):
                continue  # made elsewhere: the kernel is tried once, on the first layer
            for path, variant in per_linear.items():
                weight = self._linears[path].weight.data
                with self._naming(path):
                    preflight(variant, weight, f"layer {self.index}, {path}")

    def full_tensors(self) -> TensorMap:
        """The weights, `[N, K]`, where they lie now."""
        return {f"{path}.weight": linear.weight.data for path, linear in self._linears.items()}

    def loaded_tensors(self) -> TensorMap:
        """`full_tensors`, and the norms and biases that a variant may replace, as loaded."""
        replaceable = {name: parameter.loaded for name, parameter in self._replaceable.items()}
        return {**self.full_tensors(), **replaceable}

    def variant_tensors(self, variant: str, full: TensorMap) -> TensorMap:
        """Raises `UnfitWeight`, naming it, `SourceError` where the source's tensors do not fit, and
        KeyError for a variant that was not asked for."""
        encoders = self._variants[variant]
        made = self._source.tensors(self.index, variant) if self._source else None
        if made is not None:
            return self._checked(made, variant)
        return self._collect(lambda path, encoder: encoder.encode(full[f"{path}.weight"]), encoders)

    def is_derived(self, variant: str) -> bool:
        if self._source and self._source.provides(self.index, variant):
            return False
        return all(isinstance(v, DerivedVariant) for v in self._variants[variant].values())

    def is_lossless(self, variant: str) -> bool:
        return self.is_derived(variant) and all(
            isinstance(v, NestedVariant) for v in self._variants[variant].values()
        )

    def derived_like(self, variant: str) -> TensorMap:
        return self._collect(
            lambda path, encoder: _layout_of(encoder, self._linears[path].weight),
            self._derived(variant),
        )

    def derive(self, variant: str, full: TensorMap, out: TensorMap) -> None:
        parts = self._by_linear(out)
        for path, encoder in self._derived(variant).items():
            encoder.derive(full[f"{path}.weight"], parts[path])

    def residual_tensors(self, variant: str, full: TensorMap) -> TensorMap:
        return self._collect(
            lambda path, encoder: encoder.residual(full[f"{path}.weight"]), self._nested(variant)
        )

    def rebuild(
        self,
        variant: str,
        tensors: TensorMap,
        residual: TensorMap,
        out: TensorMap,
        spare: torch.Tensor,
    ) -> None:
        parts, rest = self._by_linear(tensors), self._by_linear(residual)
        for path, encoder in self._nested(variant).items():
            rebuild_in_blocks(encoder, parts[path], rest[path], out[f"{path}.weight"], spare)

    def bind(self, variant: str, tensors: TensorMap) -> None:
        """Under a variant `weight.data` stays the view it was, and its bytes mean nothing."""
        if variant == FULL:
            for path, linear in self._linears.items():
                linear.weight.data = tensors[f"{path}.weight"]
                linear.module.quant_method = linear.method
        else:
            parts = self._by_linear(tensors)
            for path, kernel in self._variants[variant].items():
                self._linears[path].module.quant_method = VariantLinearMethod(kernel, parts[path])
        for name, parameter in self._replaceable.items():
            parameter.use(tensors.get(name))

    def prepare_merged(self, variant: str) -> int:
        """Raises RuntimeError, one line with the remedy, where the kernels cannot be had."""
        sizes = [0]
        for path, encoder in self._nested(variant).items():
            weight = self._linears[path].weight
            encoder.prepare_merged(weight.data)
            rows, columns = _merged_shape(encoder, weight)
            sizes.append(rows * columns * weight.itemsize)
        return max(sizes)

    def bind_merged(
        self, variant: str, tensors: TensorMap, residual: TensorMap, scratch: torch.Tensor
    ) -> None:
        """Where scratch holds some rows only, `weight.data` stays and its bytes mean nothing."""
        parts, rest = self._by_linear(tensors), self._by_linear(residual)
        for path, encoder in self._nested(variant).items():
            linear = self._linears[path]
            weight = linear.weight.data
            rows, columns = _merged_shape(encoder, weight)
            held = scratch[: rows * columns * weight.itemsize].view(weight.dtype)
            halves = Halves(parts[path], rest[path], held.view(rows, columns))
            if halves.scratch.shape == weight.shape:
                linear.weight.data = halves.scratch
            linear.module.quant_method = MergedLinearMethod(linear.method, encoder, halves)

    def _derived(self, variant: str) -> dict[str, DerivedVariant]:
        found = self._variants[variant]
        return {path: v for path, v in found.items() if isinstance(v, DerivedVariant)}

    def _nested(self, variant: str) -> dict[str, NestedVariant]:
        found = self._variants[variant]
        return {path: v for path, v in found.items() if isinstance(v, NestedVariant)}

    def _collect(
        self, make: Callable[[str, _V], Mapping[str, torch.Tensor]], encoders: Mapping[str, _V]
    ) -> TensorMap:
        """`make(path, encoder)` of every linear, under names that carry the path."""
        tensors: dict[str, torch.Tensor] = {}
        for path, encoder in encoders.items():
            with self._naming(path):
                parts = make(path, encoder)
            tensors |= {f"{path}.{part}": tensor for part, tensor in parts.items()}
        return tensors

    @contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        """Say of which linear a complaint is."""
        try:
            yield
        except ValueError as error:
            raise UnfitWeight(f"layer {self.index}, {path}: {error}") from error

    def _checked(self, made: TensorMap, variant: str) -> TensorMap:
        """A source's tensors, its parameters in the dtype of those they replace.

        Raises `SourceError` where they are not what this layer needs.
        """
        where = f"layer {self.index} in {variant}"
        tensors = dict(made)
        for name in made.keys() & self._replaceable.keys():
            loaded = self._replaceable[name].loaded
            if made[name].shape != loaded.shape:
                raise SourceError(
                    f"{where}: {name} is {list(made[name].shape)}, in the model "
                    f"{list(loaded.shape)}; take the variants of this very model"
                )
            tensors[name] = made[name].to(loaded.dtype)
        paths = {name.rpartition(".")[0] for name in made.keys() - self._replaceable.keys()}
        if unfit := paths ^ self._linears.keys():
            raise SourceError(
                f"{where}: tensors of {', '.join(sorted(unfit))} are missing or not known; "
                "take the variants of this very model"
            )
        return tensors

    def _by_linear(self, tensors: TensorMap) -> dict[str, dict[str, torch.Tensor]]:
        parts: dict[str, dict[str, torch.Tensor]] = {path: {} for path in self._linears}
        for name, tensor in tensors.items():
            if name not in self._replaceable:
                path, _, part = name.rpartition(".")
                parts[path][part] = tensor
        return parts


def _layout_of(variant: DerivedVariant, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    return variant.empty_parts(rows, columns, "meta")


def _merged_shape(variant: NestedVariant, weight: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the scratch memory that `variant` wants for `weight`."""
    rows, columns = weight.shape
    return variant.merged_rows(rows, columns, weight.itemsize), columns


def find_morphable_layers(
    model: torch.nn.Module,
    variants: Sequence[str] | None = None,
    quantizer: str = "rtn",
    source: VariantSource | None = None,
) -> list[SglangLayer]:
    """Every decoder layer of `model`, in order, ready for `variants` (None: the device's default).

    What `source` does not provide is made by `quantizer`.

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
    return [
        SglangLayer(
            index,
            found,
            _choose(index, found, encoders),
            _find_replaceable(decoder[index]),
            source,
        )
        for index, found in enumerate(linears)
    ]


def _choose(
    index: int, linears: Mapping[str, _Linear], encoders: Mapping[str, Variant]
) -> dict[str, dict[str, Variant]]:
    """Variant -> path -> the variant, or the stand-in that the linear's values call for."""
    chosen: dict[str, dict[str, Variant]] = {}
    for name, encoder in encoders.items():
        chosen[name] = {}
        for path, linear in linears.items():
            try:
                chosen[name][path] = encoder.for_weight(linear.weight.data)
            except ValueError as error:
                raise _unsupported(index, path, str(error)) from error
    return chosen


def _find_replaceable(layer: torch.nn.Module) -> dict[str, _Replaceable]:
    parameters = dict(layer.named_parameters())
    return {
        name: _Replaceable(parameters[name])
        for name in REPLACEABLE_PARAMETERS
        if name in parameters
    }


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
