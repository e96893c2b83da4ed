"""Names of quantizers: of those that round a weight, and of those that look at a whole layer."""

from __future__ import annotations

from sglang_morph.precision.quantizers.awq import Awq
from sglang_morph.precision.quantizers.base import Quantizer
from sglang_morph.precision.quantizers.gptq import Gptq
from sglang_morph.precision.quantizers.layer import AsTheyAre, LayerQuantizer
from sglang_morph.precision.quantizers.rtn import RoundToNearest

QUANTIZERS: dict[str, type[Quantizer]] = {RoundToNearest.name: RoundToNearest}
LAYER_QUANTIZERS: dict[str, type[LayerQuantizer]] = {
    AsTheyAre.name: AsTheyAre,
    Awq.name: Awq,
    Gptq.name: Gptq,
}
"""What `--quantizer` may name."""


def create_quantizer(name: str) -> Quantizer:
    """Raises ValueError for an unknown name."""
    if name not in QUANTIZERS:
        raise ValueError(f"unknown quantizer {name!r}; known are {', '.join(sorted(QUANTIZERS))}")
    return QUANTIZERS[name]()


def create_layer_quantizer(name: str) -> LayerQuantizer:
    """Raises ValueError for an unknown name."""
    if name not in LAYER_QUANTIZERS:
        known = ", ".join(sorted(LAYER_QUANTIZERS))
        raise ValueError(f"unknown quantizer {name!r}; known are {known}")
    return LAYER_QUANTIZERS[name]()
