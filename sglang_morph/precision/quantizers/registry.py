"""Names of quantizers."""

from __future__ import annotations

from sglang_morph.precision.quantizers.base import Quantizer
from sglang_morph.precision.quantizers.rtn import RoundToNearest

QUANTIZERS: dict[str, type[Quantizer]] = {RoundToNearest.name: RoundToNearest}


def create_quantizer(name: str) -> Quantizer:
    """Raises ValueError for an unknown name."""
    if name not in QUANTIZERS:
        raise ValueError(f"unknown quantizer {name!r}; known are {', '.join(sorted(QUANTIZERS))}")
    return QUANTIZERS[name]()
