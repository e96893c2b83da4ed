"""The quantizer interface: a float weight in, integer codes with scales and zeros out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight `[N, K]` in groups of `group_size` along K; group `g` holds columns `g * group_size`
    and up. The code in the middle, `midpoint`, stands for the group's zero:

        weight = (code - midpoint) * scale + zero
    """

    codes: torch.Tensor
    """uint8 `[N, K]`, each in `[0, 2**bits)`."""
    scales: torch.Tensor
    """`[N, K / group_size]`, above 0. Their dtype is what the kernel will read."""
    zeros: torch.Tensor
    """`[N, K / group_size]`, dtype of `scales`: the value of code `midpoint`, not an integer."""
    bits: int
    group_size: int

    @property
    def midpoint(self) -> int:
        return 1 << (self.bits - 1)

    def dequantize(self) -> torch.Tensor:
        """float32 `[N, K]`."""
        rows, columns = self.codes.shape
        grouped = self.codes.view(rows, -1, self.group_size).float() - self.midpoint
        weight = grouped * self.scales.float().unsqueeze(-1) + self.zeros.float().unsqueeze(-1)
        return weight.view(rows, columns)


class Quantizer(ABC):
    """Chooses codes, scales and zeros."""

    name: ClassVar[str]

    @abstractmethod
    def quantize(
        self,
        weight: torch.Tensor,
        bits: int,
        group_size: int,
        parameter_dtype: torch.dtype = torch.float32,
    ) -> QuantizedWeight:
        """Quantize `weight` (floating, `[N, K]`) on its device.

        Codes are chosen against scales and zeros as rounded to `parameter_dtype`, so that the
        rounding costs no accuracy. Raises ValueError for a bad shape, dtype, or value.
        """


def check_weight(weight: torch.Tensor, bits: int, group_size: int) -> None:
    """Raises ValueError, naming the cause, unless `weight` can be quantized this way."""
    if not 2 <= bits <= 8:
        raise ValueError(f"{bits} bits are not supported; use 2 to 8")
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"a floating [N, K] weight is needed, not {weight.dtype} {weight.shape}")
    if group_size < 1 or weight.shape[1] % group_size:
        raise ValueError(f"group size {group_size} does not divide K = {weight.shape[1]}")
    finite = torch.isfinite(weight)
    if not finite.all():
        row, column = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"the weight has {int((~finite).sum())} values that are infinite or NaN, "
            f"the first at row {row}, column {column}; the checkpoint is damaged"
        )
