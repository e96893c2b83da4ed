"""Asymmetric, group-wise round to nearest with integer zero points, as in AWQ checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class IntegerZeros:
    """A weight `[N, K]` in groups along K: weight = (code - zero) * scale."""

    codes: torch.Tensor
    """uint8 `[N, K]`."""
    scales: torch.Tensor
    """`[N, K / group_size]`, above 0, in the dtype of the weight."""
    zeros: torch.Tensor
    """uint8 `[N, K / group_size]`: the code that stands for 0."""

    def rows(self, index: torch.Tensor) -> IntegerZeros:
        """Of those rows only."""
        return IntegerZeros(self.codes[index], self.scales[index], self.zeros[index])

    def dequantize(self) -> torch.Tensor:
        """float32 `[N, K]`."""
        rows, columns = self.codes.shape
        grouped = self.codes.view(rows, self.scales.shape[1], -1).float()
        weight = (grouped - self.zeros.unsqueeze(-1)) * self.scales.float().unsqueeze(-1)
        return weight.view(rows, columns)


def quantize_integer_zeros(weight: torch.Tensor, bits: int, group_size: int) -> IntegerZeros:
    """Quantize `weight` (floating, finite, `[N, K]`, K divisible by `group_size`) on its device.

    Every group's range is made to hold 0. Codes are chosen against scales as rounded to the
    weight's dtype.
    """
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // group_size, group_size)
    low, high = grouped.aminmax(dim=-1)
    low, high = low.clamp_max(0), high.clamp_min(0)
    top = (1 << bits) - 1
    steps = ((high - low) / top).clamp_min(torch.finfo(weight.dtype).tiny)
    scales = steps.to(weight.dtype)
    zeros = (-low / scales.float()).round().clamp_(0, top)
    codes = (grouped / scales.float().unsqueeze(-1)).round_() + zeros.unsqueeze(-1)
    return IntegerZeros(
        codes.clamp_(0, top).to(torch.uint8).view(rows, columns), scales, zeros.to(torch.uint8)
    )
