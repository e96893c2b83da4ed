"""Asymmetric, group-wise round to nearest: each group's range is spread evenly over the codes."""

from __future__ import annotations

import torch

from sglang_morph.precision.quantizers.base import QuantizedWeight, Quantizer, check_weight


class RoundToNearest(Quantizer):
    """Error at most half a scale for every weight, by construction: nothing is clipped."""

    name = "rtn"

    def quantize(
        self,
        weight: torch.Tensor,
        bits: int,
        group_size: int,
        parameter_dtype: torch.dtype = torch.float32,
    ) -> QuantizedWeight:
        check_weight(weight, bits, group_size)
        rows, columns = weight.shape
        grouped = weight.float().view(rows, columns // group_size, group_size)
        low, high = grouped.aminmax(dim=-1)
        below = 1 << (bits - 1)  # codes below the midpoint; one fewer lies above it
        above = below - 1

        # Low and high weighted, not `low + below * scale`: their difference could overflow.
        share = below / (below + above)
        zeros = (high * share + low * (1 - share)).to(parameter_dtype)
        # Rounding moved the zero, so the scale must cover the side that has become longer.
        reach = torch.maximum((high - zeros.float()) / above, (zeros.float() - low) / below)
        scales = _round_up(reach.clamp_min(torch.finfo(parameter_dtype).tiny), parameter_dtype)
        if not torch.isfinite(scales).all():
            raise ValueError(f"the weight's range exceeds what {parameter_dtype} can scale")

        offset = grouped - zeros.float().unsqueeze(-1)
        codes = (offset / scales.float().unsqueeze(-1)).round_().clamp_(-below, above).add_(below)
        return QuantizedWeight(
            codes.to(torch.uint8).view(rows, columns), scales, zeros, bits, group_size
        )


def _round_up(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 `values` above 0 in `dtype`, none smaller than it was."""
    nearest = values.to(dtype)
    next_up = (values * (1 + torch.finfo(dtype).eps)).to(dtype)
    return torch.where(nearest.float() < values, next_up, nearest)
