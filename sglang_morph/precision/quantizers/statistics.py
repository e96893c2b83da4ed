"""What a linear read during calibration, summed up so that tokens need not be kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """Sums over calibration tokens `x [K]` of one linear. Those of two sets of tokens add up."""

    gram: torch.Tensor
    """float32 `[K, K]`: the sum of `x x^T`, which prices any error of the weight exactly."""
    magnitude: torch.Tensor
    """float32 `[K]`: the sum of `|x|`."""
    tokens: int

    @classmethod
    def of(cls, x: torch.Tensor) -> InputStatistics:
        """Of activations `[..., K]`, on their device."""
        rows = x.reshape(-1, x.shape[-1]).float()
        return cls(rows.t() @ rows, rows.abs().sum(dim=0), rows.shape[0])

    def __add__(self, other: InputStatistics) -> InputStatistics:
        return InputStatistics(
            self.gram + other.gram, self.magnitude + other.magnitude, self.tokens + other.tokens
        )

    @property
    def mean_magnitude(self) -> torch.Tensor:
        """float32 `[K]`: the mean of `|x|`."""
        return self.magnitude / max(self.tokens, 1)

    def scaled(self, scales: torch.Tensor) -> InputStatistics:
        """Of the same inputs divided by `scales` `[K]`."""
        gram = self.gram / torch.outer(scales, scales)
        return InputStatistics(gram, self.magnitude / scales, self.tokens)

    def gram_blocks(self, size: int) -> torch.Tensor:
        """float32 `[K / size, size, size]`: the blocks of `gram` along its diagonal."""
        groups = self.gram.shape[0] // size
        return torch.stack(
            [self.gram.view(groups, size, groups, size)[g, :, g] for g in range(groups)]
        )

    def output_error(self, difference: torch.Tensor) -> float:
        """Mean squared error of a linear's outputs, summed over them, if its weight were off by
        `difference` (float32 `[N, K]`)."""
        return float(torch.sum((difference @ self.gram) * difference)) / max(self.tokens, 1)


def statistics_of(inputs: Mapping[str, torch.Tensor]) -> dict[str, InputStatistics]:
    """Linear's path -> statistics of what it read, `[..., K]`."""
    return {path: InputStatistics.of(x) for path, x in inputs.items()}
