"""The variant interface: a smaller representation of a linear's weight, and computing with it.

A variant has no state of its own. What it computes with are *parts*: named, kernel-ready tensors
that `encode` makes on the host, and that later lie wherever a memory backend has put them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from sglang_morph.precision.names import NOMINAL_BITS
from sglang_morph.precision.quantizers.base import QuantizedWeight, Quantizer

Parts = Mapping[str, torch.Tensor]


class Variant(ABC):
    """One representation of a linear's weight `[N, K]`, for one kind of device."""

    name: ClassVar[str]
    """Key of `NOMINAL_BITS`; the same name on every device."""

    @property
    def nominal_bits(self) -> int:
        return NOMINAL_BITS[self.name]

    @abstractmethod
    def supports(self, rows: int, columns: int) -> str | None:
        """Why a `[rows, columns]` weight can't take this variant; None if it can."""

    @abstractmethod
    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a floating `[N, K]` weight, contiguous, on the host, in slab order.

        Raises ValueError for a shape that `supports` refuses, or for a damaged weight.
        """

    @abstractmethod
    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x [..., K] @ weight.T + bias`, in the dtype of `x`, `[..., N]`. M may be 0."""

    @abstractmethod
    def reference(self, weight: torch.Tensor) -> torch.Tensor:
        """float32 `[N, K]` on the host: the weight that `linear` on `encode(weight)` stands for."""


class QuantizedVariant(Variant):
    """A variant made from integer codes: a quantizer chooses them, the subclass lays them out."""

    parameter_dtype: ClassVar[torch.dtype]
    """Precision of scales and zeros."""

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer

    @abstractmethod
    def group_size(self, columns: int) -> int:
        """Weights that share one scale in a row of `columns`."""

    @abstractmethod
    def pack(self, quantized: QuantizedWeight) -> dict[str, torch.Tensor]:
        """Lay the codes out as the kernel wants them."""

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.pack(self._quantize(weight))

    def reference(self, weight: torch.Tensor) -> torch.Tensor:
        return self._quantize(weight).dequantize()

    def _quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        if weight.ndim == 2 and (reason := self.supports(*weight.shape)):
            raise ValueError(reason)
        columns = weight.shape[-1]
        return self._quantizer.quantize(
            weight.cpu(), self.nominal_bits, self.group_size(columns), self.parameter_dtype
        )


def rows_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x [..., K]` as a `[M, K]` matrix of `dtype`, as the kernels take it."""
    return x.reshape(-1, x.shape[-1]).to(dtype)


def finish(y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A kernel's `y [M, N]` in the dtype and the leading shape of its input `x`, bias added.

    May write into `y`.
    """
    y = y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y.add_(bias)
