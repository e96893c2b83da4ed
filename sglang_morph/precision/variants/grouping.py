"""How codes are grouped and stored, the same on every device."""

from __future__ import annotations

import torch

from sglang_morph.precision.quantizers.base import QuantizedWeight

INT4_GROUP_SIZES = (64, 32)


def int4_group_size(columns: int) -> int:
    """The largest of `INT4_GROUP_SIZES` that divides `columns`, else the smallest."""
    return next((size for size in INT4_GROUP_SIZES if columns % size == 0), INT4_GROUP_SIZES[-1])


def int8_parts(quantized: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Signed codes `[N, K]`, `scales [N]` and float32 `offsets [N]`; one group is one row.

    weight = code * scale + offset
    """
    return {
        "codes": (quantized.codes ^ 0x80).view(torch.int8),  # minus the midpoint, in place of 128
        "scales": quantized.scales.flatten(),
        "offsets": quantized.zeros.flatten().float(),
    }
