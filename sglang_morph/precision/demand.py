"""What a request may ask of precision: `{"min_precision": "full"}`, under the name `morph`.

Checked in the server process, before the request is sent on; imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sglang_morph.precision.names import FULL, NOMINAL_BITS

FIELD: Final = "morph"
"""Name of the field in a request's body and among SGLang's custom parameters."""

_MIN_PRECISION: Final = "min_precision"


class DemandError(ValueError):
    """A demand is not one. Starts with `field`, the name of what is wrong in the body."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


def min_precision(demand: Any) -> str | None:
    """The variant that no layer may fall below; None if nothing is asked. Raises `DemandError`."""
    if demand is None:
        return None
    if not isinstance(demand, dict):
        raise DemandError(FIELD, f'must be an object such as {{"{_MIN_PRECISION}": "{FULL}"}}')
    if unknown := sorted(str(key) for key in demand.keys() - {_MIN_PRECISION}):
        raise DemandError(f"{FIELD}.{unknown[0]}", f"is unknown; the field is {_MIN_PRECISION!r}")
    wanted = demand.get(_MIN_PRECISION)
    if wanted is not None and (not isinstance(wanted, str) or wanted not in NOMINAL_BITS):
        known = ", ".join(NOMINAL_BITS)
        raise DemandError(f"{FIELD}.{_MIN_PRECISION}", f"is {wanted!r}; give one of {known}")
    return wanted


def floor_level(levels: Sequence[Sequence[str]], wanted: str) -> int:
    """The highest level at which no layer has fewer nominal bits than the variant `wanted`.

    `levels`: each level's variants, one a layer. Layers only shrink from one level to the next.
    """
    lowest_bits = [min(NOMINAL_BITS[variant] for variant in layers) for layers in levels]
    return max(k for k, bits in enumerate(lowest_bits) if k == 0 or bits >= NOMINAL_BITS[wanted])
