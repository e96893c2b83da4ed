"""Merging on a CPU, by few torch operations over blocks that stay in the cache.

See `encoding` for what is computed. Two identities leave little to do. With `u` and `l` the halves
as signed bytes, and all arithmetic wrapping around in 16 bits:

E4M3: `w = (128 * u + d) & 0xBFFF`, where `d = l - 128 * u` in 8 bits. A weight is at most 64 units
    in the last place away from its upper half's value, so their difference is a signed byte; the
    mask clears the copy of the sign at bit 14.
E5M2: `w = 256 * u + l`. Bit 7 of the lower half was added when the upper one was rounded, and the
    sign of `l` takes it off again.

The buffers exist once: all callers are the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn.functional import linear

from sglang_morph.precision.nested.encoding import Nesting

BLOCK = 1 << 19
"""Elements. Smaller blocks cost more in calls, larger ones leave the cache."""

# As tensors: torch would make one of a Python number in every call.
_WITHOUT_BIT_14 = torch.tensor(-0x4001, dtype=torch.int16)
_UPPER_PLACE = {
    Nesting.E4M3: torch.tensor(128, dtype=torch.int16),
    Nesting.E5M2: torch.tensor(256, dtype=torch.int16),
}


@dataclass(frozen=True, slots=True)
class _Buffers:
    upper: torch.Tensor
    word: torch.Tensor
    difference: torch.Tensor
    weight: torch.Tensor


@cache
def _buffers() -> _Buffers:
    return _Buffers(
        upper=torch.empty(BLOCK, dtype=torch.int16),
        word=torch.empty(BLOCK, dtype=torch.int16),
        difference=torch.empty(BLOCK, dtype=torch.int8),
        weight=torch.empty(BLOCK, dtype=torch.float32),
    )


def merge_into(
    upper: torch.Tensor, lower: torch.Tensor, weight: torch.Tensor, nesting: Nesting
) -> None:
    """See `ops.merge_into`, which checks the arguments. Allocates nothing."""
    uppers, lowers, weights = upper.view(-1), lower.view(-1), weight.view(-1)
    for start, stop in _blocks(len(weights), BLOCK):
        block = slice(start, stop)
        word = _merged(uppers[block].view(torch.int8), lowers[block].view(torch.int8), nesting)
        weights[block].copy_(word.view(torch.float16))


def upper_linear(upper: torch.Tensor, x: torch.Tensor, nesting: Nesting) -> torch.Tensor:
    """`x [M, K]` (float32) by the transpose of the weight that `upper` (uint8 `[N, K]`, K at most
    `BLOCK`) stands for: float32 `[M, N]`.

    The weight is made some rows at a time, just before they are used.
    """
    rows, columns = upper.shape
    y = torch.empty(len(x), rows)
    step = max(1, BLOCK // columns)
    for start, stop in _blocks(rows, step):
        y[:, start:stop] = linear(x, _upper_rows(upper[start:stop], nesting))
    return y


def _merged(upper: torch.Tensor, lower: torch.Tensor, nesting: Nesting) -> torch.Tensor:
    """int16: the float16 bits of a block's halves (int8)."""
    buffers, count = _buffers(), len(upper)
    high, word = buffers.upper[:count].copy_(upper), buffers.word[:count]
    if nesting is Nesting.E5M2:
        return word.copy_(lower).add_(high, alpha=256)
    difference = torch.add(lower, upper, alpha=-128, out=buffers.difference[:count])
    return word.copy_(difference).add_(high, alpha=128).bitwise_and_(_WITHOUT_BIT_14)


def _upper_rows(upper: torch.Tensor, nesting: Nesting) -> torch.Tensor:
    """float32, the shape of `upper` (uint8, at most a block): what these upper halves stand for."""
    buffers, count = _buffers(), upper.numel()
    word = buffers.word[:count].copy_(upper.view(-1).view(torch.int8)).mul_(_UPPER_PLACE[nesting])
    if nesting is Nesting.E4M3:
        word.bitwise_and_(_WITHOUT_BIT_14)
    return buffers.weight[:count].copy_(word.view(torch.float16)).view(upper.shape)


def _blocks(length: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, step):
        yield start, min(start + step, length)
