"""Where a residual may lie so that a lossless variant is rebuilt in place, from front to back.

A slab's full weights grow from its front while the residual at its end is used up, both in slab
order. A weight is at least twice as long as its lower half, so what is written stays behind what
has yet to be read if the residual as a whole begins late enough.
"""

from __future__ import annotations

from memory_backends.base import is_lower
from memory_backends.slab import Layout, align

SPARE_BYTES = 16 << 20
"""Of lower halves that are copied aside at a time; many small copies would be slower."""


def residual_start(full: Layout, lossless: Layout, residual: Layout) -> int:
    """The first byte of a slab at which `residual` may begin; a multiple of the alignment.

    It begins behind the variant. The lower halves of a weight end no earlier than the weight; then,
    as both shrink towards their beginnings, no row is written over the lower half of a later one.
    What else there is of a weight's residual is read last, so it begins no earlier than its end.
    """
    ends = {_linear(name): part.offset + part.nbytes for name, part in full.parts.items()}
    start = lossless.nbytes
    for name, part in residual.parts.items():
        safe = part.offset + part.nbytes if is_lower(name) else part.offset
        start = max(start, ends[_linear(name)] - safe)
    return align(start)


def spare_bytes(residual: Layout) -> int:
    """Memory that a rebuild copies lower halves to."""
    longest = max(part.nbytes for name, part in residual.parts.items() if is_lower(name))
    return align(min(SPARE_BYTES, longest))


def _linear(name: str) -> str:
    """The linear that a tensor belongs to: its name without the last part."""
    return name.rpartition(".")[0]
