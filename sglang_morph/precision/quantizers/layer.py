"""Quantizing one decoder layer as a whole.

A *layer quantizer* changes the weights so that rounding them costs least; the variants then round.
What it changes in one place it makes up for in another (a linear's inputs are scaled by the norm
before it, say), so that apart from rounding the layer computes what it computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from sglang_morph.precision.quantizers.base import QuantizedWeight
from sglang_morph.precision.quantizers.integer_zeros import IntegerZeros
from sglang_morph.precision.quantizers.rtn import RoundToNearest
from sglang_morph.precision.quantizers.statistics import InputStatistics
from sglang_morph.precision.variants.base import IntegerZerosVariant, QuantizedVariant, Variant
from sglang_morph.precision.variants.registry import create_variant

Variants = Mapping[str, Variant]
"""Linear's path -> the variant that it takes."""

Codes = QuantizedWeight | IntegerZeros
"""Of a weight: what a `QuantizedVariant`, or else an `IntegerZerosVariant`, is packed from."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a decoder layer that quantizing may change, in the dtype the server uses."""

    linears: Mapping[str, torch.Tensor]
    """Path -> weight `[N, K]`, fused as SGLang has them; paths as in `MORPHABLE_LINEARS`."""
    norms: Mapping[str, torch.Tensor]
    """Path -> weight `[K]` of the norms before the linears; empty: the norms must stay."""
    fixed_rows: frozenset[str] = frozenset()
    """Linears whose rows must not be scaled, because they have a bias."""
    codes: Mapping[str, Codes] = field(default_factory=dict)
    """Path -> codes that have been chosen already, for one variant; else the variant rounds."""

    def rounded(self, variants: Variants) -> dict[str, torch.Tensor]:
        """Path -> the float32 weight that `variants` stand for, norms included."""
        linears = {
            path: self.codes[path].dequantize()
            if path in self.codes
            else variants[path].reference(weight).float()
            for path, weight in self.linears.items()
        }
        return linears | {path: norm.float() for path, norm in self.norms.items()}

    def encoded(self, variants: Variants, loaded: LayerWeights) -> dict[str, torch.Tensor]:
        """Tensors for a `VariantSource`: the linears' parts, and the norms unlike those `loaded`.

        Raises ValueError, naming the linear, where one cannot be encoded.
        """
        tensors: dict[str, torch.Tensor] = {}
        for path, weight in self.linears.items():
            try:
                codes = self.codes.get(path)
                variant = variants[path]
                parts = variant.encode(weight) if codes is None else _packed(variant, codes)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            tensors |= {f"{path}.{part}": tensor for part, tensor in parts.items()}
        for path, norm in self.norms.items():
            if not torch.equal(norm, loaded.norms[path]):
                tensors[f"{path}.weight"] = norm.cpu()
        return tensors


def _packed(variant: Variant, codes: Codes) -> dict[str, torch.Tensor]:
    if isinstance(codes, QuantizedWeight) and isinstance(variant, QuantizedVariant):
        tensors = {name: getattr(codes, name).cpu() for name in ("codes", "scales", "zeros")}
        return variant.pack(replace(codes, **tensors))
    if isinstance(codes, IntegerZeros) and isinstance(variant, IntegerZerosVariant):
        return variant.pack_integer_zeros(codes)
    raise ValueError(f"{variant.name} is not packed from {type(codes).__name__}")


class LayerQuantizer(ABC):
    """Chooses what is to be rounded."""

    name: ClassVar[str]
    needs_inputs: ClassVar[bool]
    """Whether it looks at activations from calibration."""

    @abstractmethod
    def adapt(
        self,
        layer: LayerWeights,
        variants: Variants,
        inputs: Mapping[str, InputStatistics] | None = None,
    ) -> LayerWeights:
        """The weights and norms to round instead of those of `layer`, on their device.

        `inputs`: path -> what the linear reads, of every linear; None only where they are not
        needed. Raises ValueError for a damaged weight.
        """

    def needed(self, inputs: Mapping[str, InputStatistics] | None) -> Mapping[str, InputStatistics]:
        """`inputs`, for one that needs them. Raises ValueError where they are not there."""
        if inputs is None:
            raise ValueError(
                f"{self.name} needs activations from calibration; give some, or use rtn"
            )
        return inputs


class AsTheyAre(LayerQuantizer):
    """`rtn`: the weights themselves are rounded to nearest."""

    name = RoundToNearest.name
    needs_inputs = False

    def adapt(
        self,
        layer: LayerWeights,
        variants: Variants,
        inputs: Mapping[str, InputStatistics] | None = None,
    ) -> LayerWeights:
        return layer


def variants_for(
    name: str, device_type: str, linears: Mapping[str, torch.Tensor]
) -> dict[str, Variant]:
    """Path -> variant `name` on `device_type` for that weight. Raises ValueError."""
    variant = create_variant(name, device_type, RoundToNearest())
    return {path: variant.for_weight(weight) for path, weight in linears.items()}
