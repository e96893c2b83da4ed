"""The nested encoding: a 16-bit weight as two bytes, the upper of which is an FP8 weight by itself.

After NestedFP (NeurIPS 2025), in torch, on any device. An fp16 weight has the bits
`s eeeee mmmmmmmmmm`; its *lower* byte is kept as it is. The *upper* byte depends on the nesting:

E4M3, for |w| <= 1.75: the top exponent bit is 0 and is dropped. The upper byte is
    `s eeee mmm`, rounded to nearest even: the E4M3 code of `w * 256`.
E5M2, for |w| < 61440: the upper byte is the weight's own upper byte, rounded half away from zero:
    an E5M2 code of `w`.

Bit 7 of the weight decides how `merge` undoes the rounding. With E4M3 it is stored twice: rounding
happened where it differs from the upper byte's last bit. With E5M2 it is what was added.

bf16 and float32 weights go through fp16. For bf16 that is exact from 2**-17 up; the few smaller
ones that do not come back are *exceptions*, kept as they were. float32 weights nest where they were
loaded from a 16-bit checkpoint, as on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

E4M3_SCALE = 2.0**-8
"""What an E4M3 upper byte is to be multiplied by."""
E4M3_BOUND = 1.75
"""448 / 256: the largest magnitude with an E4M3 upper byte."""
E5M2_BOUND = 61440.0
"""The smallest magnitude whose upper byte would round to infinity."""
MAX_EXCEPTIONS = 0.01
"""Share of a weight's elements. Each costs 6 or 8 bytes, so 1% adds 6 or 8% to the lower halves."""
MAX_RELATIVE_ERROR = 0.06
"""Of the upper halves alone. Gaussian weights show 0.027 with E4M3 and 0.053 with E5M2."""


NESTABLE = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of weights that may nest."""


class Nesting(Enum):
    """How a weight is nested."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    NONE = "none"

    @property
    def dtype(self) -> torch.dtype:
        """Of the upper byte. Raises KeyError for NONE."""
        return {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[self.value]

    @property
    def scale(self) -> float:
        """An upper byte times this is a weight."""
        return E4M3_SCALE if self is Nesting.E4M3 else 1.0


@dataclass(frozen=True, slots=True)
class Exceptions:
    """bf16 or float32 weights that fp16 cannot hold."""

    index: torch.Tensor
    """int32 `[E]`, into the flattened weight, ascending."""
    bits: torch.Tensor
    """int16 `[E]`, or int32 of float32: the weights, bit for bit."""


def split(half: torch.Tensor, nesting: Nesting = Nesting.E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower bytes (uint8) of float16 weights within the nesting's bound, any shape."""
    bits = half.view(torch.int16).int()
    lower = (bits & 0xFF).to(torch.uint8)
    if nesting is Nesting.E5M2:
        upper = (bits >> 8) + ((bits >> 7) & 1)
    else:
        magnitude = bits & 0x7FFF
        # To nearest even: half of the last place kept, less one where that place is even.
        rounded = (magnitude + 0x3F + ((magnitude >> 7) & 1)) >> 7
        upper = ((bits >> 8) & 0x80) | rounded
    return (upper & 0xFF).to(torch.uint8), lower


def merge(
    upper: torch.Tensor, lower: torch.Tensor, nesting: Nesting = Nesting.E4M3
) -> torch.Tensor:
    """float16 weights of their two bytes (uint8, same shape): the inverse of `split`."""
    high = upper.int() - (lower >> 7).int()
    if nesting is Nesting.E4M3:
        high = (upper.int() & 0x80) | ((high >> 1) & 0x3F)
    return ((high << 8) | lower.int()).to(torch.int16).view(torch.float16)


def find_exceptions(weight: torch.Tensor) -> Exceptions:
    """The exceptions of a weight, on its device; float16 has none."""
    flat = weight.flatten()
    back = flat.to(torch.float16).to(weight.dtype)
    index = (_bits(back) != _bits(flat)).nonzero().flatten()
    return Exceptions(index.int(), _bits(flat)[index])


def patch_exceptions(weight: torch.Tensor, exceptions: Exceptions) -> None:
    """Write the exceptions into a contiguous weight, in place, without waiting for the device."""
    _bits(weight.view(-1)).index_copy_(0, exceptions.index.long(), exceptions.bits)


def _bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int32 if weight.dtype is torch.float32 else torch.int16)


def choose_nesting(weight: torch.Tensor) -> Nesting:
    """How `weight` can be nested: E4M3 where all magnitudes allow it, else E5M2, else not at all.

    Not nestable are dtypes other than `NESTABLE`, weights with infinities, NaN or too many
    exceptions, and weights so small that the upper halves would be poor FP8 weights. Waits for the
    device; meant for start-up.
    """
    if weight.dtype not in NESTABLE:
        return Nesting.NONE
    low, high = (float(end) for end in weight.aminmax())
    magnitude = max(-low, high)
    if not magnitude < E5M2_BOUND:  # also where it is NaN
        return Nesting.NONE
    nesting = Nesting.E4M3 if magnitude <= E4M3_BOUND else Nesting.E5M2
    if find_exceptions(weight).index.numel() > MAX_EXCEPTIONS * weight.numel():
        return Nesting.NONE
    return nesting if _relative_error(weight, nesting) <= MAX_RELATIVE_ERROR else Nesting.NONE


def upper_as_float(weight: torch.Tensor, nesting: Nesting) -> torch.Tensor:
    """float32: what the upper halves of a weight stand for, by torch's casts.

    E5M2 rounds ties away from zero, torch's cast to even; so that one takes the bytes of `split`.
    """
    half = weight.to(torch.float16)
    if nesting is Nesting.E5M2:
        return split(half, nesting)[0].view(nesting.dtype).float()
    return (half.float() / E4M3_SCALE).to(nesting.dtype).float() * E4M3_SCALE


def _relative_error(weight: torch.Tensor, nesting: Nesting) -> float:
    """Norm of the upper halves' error over the norm of the weight, row by row, on average.

    By rows, because a few large weights would hide what is lost in all other outputs.
    """
    tiny = torch.finfo(torch.float32).tiny
    errors = [
        (upper_as_float(rows, nesting) - rows.float()).norm(dim=-1)
        / rows.float().norm(dim=-1).clamp_min(tiny)
        for rows in weight.split(1024)
    ]
    return float(torch.cat(errors).mean())
