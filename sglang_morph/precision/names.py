"""Names of variants and their order. Imports nothing, so arguments can be checked first."""

from __future__ import annotations

from typing import Final

FULL: Final = "full"
"""The weights as loaded."""

NOMINAL_BITS: Final = {FULL: 16, "nested_fp8": 8, "fp8": 8, "int8": 8, "int4": 4}
"""Variant -> bits per weight, scales not counted. Gives the order in which a layer may shrink."""
