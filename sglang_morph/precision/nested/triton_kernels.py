"""Split and merge in Triton, bound by memory bandwidth. See `encoding` for what they compute.

Weights are handled two a 32-bit word: 16-byte loads stay whole, and one instruction serves both.
In such a word the first weight is the low half, in a 16-bit word of bytes the low byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_morph.precision.nested.encoding import Nesting

BLOCK = 2048
"""Pairs per program: 16 weights a thread in 8 warps."""
WARPS = 8
PATCH_PROGRAMS = 128
"""As many as a GPU runs at once: how many exceptions there are is known on the device only."""
PATCH_BLOCK = 256


def split_into(
    weight: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor | None, nesting: Nesting
) -> None:
    """See `ops.split_into`, which checks the arguments."""
    pairs = weight.numel() // 2
    if pairs == 0:
        return
    upper_pairs = _flat(upper, torch.int16)
    _split_kernel[(triton.cdiv(pairs, BLOCK),)](
        _flat(weight, torch.int32),
        upper_pairs,
        upper_pairs if lower is None else _flat(lower, torch.int16),
        pairs,
        FROM_BF16=weight.dtype == torch.bfloat16,
        E5M2=nesting is Nesting.E5M2,
        WITH_LOWER=lower is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def merge_into(
    upper: torch.Tensor, lower: torch.Tensor, weight: torch.Tensor, nesting: Nesting
) -> None:
    """See `ops.merge_into`, which checks the arguments."""
    pairs = weight.numel() // 2
    if pairs == 0:
        return
    _merge_kernel[(triton.cdiv(pairs, BLOCK),)](
        _flat(upper, torch.int16),
        _flat(lower, torch.int16),
        _flat(weight, torch.int32),
        pairs,
        TO_BF16=weight.dtype == torch.bfloat16,
        E5M2=nesting is Nesting.E5M2,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def patch_rows(
    weight: torch.Tensor, index: torch.Tensor, bits: torch.Tensor, starts: torch.Tensor, first: int
) -> None:
    """See `ops.patch_rows`."""
    rows, columns = weight.shape
    _patch_kernel[(PATCH_PROGRAMS,)](
        _flat(weight, torch.int16), index, bits, starts, first, rows, columns, BLOCK=PATCH_BLOCK
    )


def _flat(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.view(-1).view(dtype)


@triton.jit
def _split_kernel(
    weight_ptr: tl.tensor,
    upper_ptr: tl.tensor,
    lower_ptr: tl.tensor,
    pairs: tl.tensor,
    FROM_BF16: tl.constexpr,  # noqa: N803
    E5M2: tl.constexpr,  # noqa: N803
    WITH_LOWER: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    inside = tl.arange(0, BLOCK)
    mask = inside < pairs - start
    word = tl.load(weight_ptr + start + inside, mask=mask, other=0)
    if FROM_BF16:
        word = _bf16_to_fp16(word)
    if E5M2:
        # Bytes are taken apart first: their carries must not meet.
        upper = ((word >> 8) & 0x00FF00FF) + ((word >> 7) & 0x00010001)
    else:
        magnitude = word & 0x7FFF7FFF
        rounded = (magnitude + 0x003F003F + ((magnitude >> 7) & 0x00010001)) >> 7
        upper = (rounded & 0x007F007F) | ((word >> 8) & 0x00800080)
    tl.store(upper_ptr + start + inside, _bytes_together(upper), mask=mask)
    if WITH_LOWER:
        tl.store(lower_ptr + start + inside, _bytes_together(word & 0x00FF00FF), mask=mask)


@triton.jit
def _merge_kernel(
    upper_ptr: tl.tensor,
    lower_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    pairs: tl.tensor,
    TO_BF16: tl.constexpr,  # noqa: N803
    E5M2: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    inside = tl.arange(0, BLOCK)
    mask = inside < pairs - start
    upper = _bytes_apart(tl.load(upper_ptr + start + inside, mask=mask, other=0))
    lower = _bytes_apart(tl.load(lower_ptr + start + inside, mask=mask, other=0))
    high = upper - ((lower >> 7) & 0x00010001)  # no borrow: a byte is at least its bit 7
    if not E5M2:
        high = (upper & 0x00800080) | ((high >> 1) & 0x003F003F)
    word = (high << 8) | lower
    if TO_BF16:
        word = _fp16_to_bf16(word)
    tl.store(weight_ptr + start + inside, word, mask=mask)


@triton.jit(do_not_specialize=["first", "rows"])
def _patch_kernel(
    weight_ptr: tl.tensor,
    index_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    start = tl.load(starts_ptr + first)
    stop = tl.load(starts_ptr + first + rows)
    origin = first.to(tl.int64) * columns
    inside = tl.arange(0, BLOCK)
    for at in range(start + tl.program_id(0) * BLOCK, stop, tl.num_programs(0) * BLOCK):
        mask = inside < stop - at
        index = tl.load(index_ptr + at + inside, mask=mask, other=0)
        bits = tl.load(bits_ptr + at + inside, mask=mask, other=0)
        tl.store(weight_ptr + (index - origin), bits, mask=mask)


@triton.jit
def _bytes_together(word: tl.tensor) -> tl.tensor:
    """int32 `00 b 00 a` -> int16 `b a`."""
    return (word | (word >> 8)).to(tl.int16)


@triton.jit
def _bytes_apart(pair: tl.tensor) -> tl.tensor:
    """int16 `b a` -> int32 `00 b 00 a`."""
    word = pair.to(tl.int32)
    return (word & 0xFF) | ((word << 8) & 0x00FF0000)


@triton.jit
def _bf16_to_fp16(word: tl.tensor) -> tl.tensor:
    """Two bf16 in an int32, rounded to nearest even to two fp16 in an int32."""
    first = (word << 16).to(tl.float32, bitcast=True).to(tl.float16)
    second = ((word >> 16) << 16).to(tl.float32, bitcast=True).to(tl.float16)
    return _pair(first.to(tl.int16, bitcast=True), second.to(tl.int16, bitcast=True))


@triton.jit
def _fp16_to_bf16(word: tl.tensor) -> tl.tensor:
    """Two fp16 in an int32 to two bf16 in an int32; by conversions, so subnormals are right."""
    first = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.bfloat16)
    second = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.bfloat16)
    return _pair(first.to(tl.int16, bitcast=True), second.to(tl.int16, bitcast=True))


@triton.jit
def _pair(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Two int16 -> int32, `first` in the low half."""
    return (first.to(tl.int32) & 0xFFFF) | (second.to(tl.int32) << 16)
