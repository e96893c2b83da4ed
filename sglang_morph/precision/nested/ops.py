"""Splitting into and merging from memory that exists: Triton on a GPU, torch on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch

from sglang_morph.precision.nested import cpu_kernels, encoding
from sglang_morph.precision.nested.encoding import NESTABLE, Nesting


def split_into(
    weight: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor | None, nesting: Nesting
) -> None:
    """Write the halves of `weight` into `upper` and, if given, `lower`.

    All contiguous, of one shape with an even number of elements, on one device, disjoint; the
    weight float16, bfloat16 or, on a CPU, float32; the halves uint8. On a GPU this only enqueues,
    on the current stream. Exceptions are not recorded.
    """
    _check(weight, upper, lower)
    if weight.is_cuda:
        _kernels().split_into(weight, upper, lower, nesting)
        return
    halves = encoding.split(weight.to(torch.float16), nesting)
    upper.copy_(halves[0])
    if lower is not None:
        lower.copy_(halves[1])


def merge_into(
    upper: torch.Tensor, lower: torch.Tensor, weight: torch.Tensor, nesting: Nesting
) -> None:
    """Write the weight of two halves into `weight`: the inverse of `split_into`, as it asks for.

    Exact but for exceptions: those are for the caller to patch. Allocates nothing.
    """
    _check(weight, upper, lower)
    if weight.is_cuda:
        _kernels().merge_into(upper, lower, weight, nesting)
    else:
        cpu_kernels.merge_into(upper, lower, weight, nesting)


def patch_rows(weight: torch.Tensor, residual: Mapping[str, torch.Tensor], first: int) -> None:
    """Write exceptions into `weight`, rows `[first, first + len(weight))` of one merged, 16 bits.

    `residual` holds them, if there are any: `exception_index` (int32, into the flattened whole
    weight, ascending), `exception_bits` (int16) and `exception_starts` (int32 `[N + 1]`, where the
    exceptions of each row begin). Only enqueues, on the current stream.
    """
    if "exception_index" not in residual:
        return
    index, bits = residual["exception_index"], residual["exception_bits"]
    starts = residual["exception_starts"]
    if weight.is_cuda:
        _kernels().patch_rows(weight, index, bits, starts, first)
        return
    inside = slice(int(starts[first]), int(starts[first + len(weight)]))
    flat = weight.view(-1).view(torch.int16)
    flat.index_copy_(0, index[inside].long() - first * weight.shape[1], bits[inside])


def exception_starts(index: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """`exception_starts` of `patch_rows`, for the exceptions of a `[rows, columns]` weight."""
    edges = torch.arange(rows + 1, dtype=index.dtype, device=index.device) * columns
    return torch.searchsorted(index, edges, out_int32=True)


def _check(weight: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor | None) -> None:
    if weight.dtype not in NESTABLE or (weight.is_cuda and weight.dtype is torch.float32):
        raise ValueError(f"weights of {weight.dtype} cannot be nested on {weight.device.type}")
    if weight.numel() % 2:
        raise ValueError(f"the kernels take weights in pairs, not {weight.numel()} elements")
    for half in (upper, lower):
        if half is not None and (half.dtype != torch.uint8 or half.shape != weight.shape):
            raise ValueError(
                f"halves of a weight {tuple(weight.shape)} are uint8 of that shape, "
                f"not {half.dtype} {tuple(half.shape)}"
            )
    if not all(t is None or t.is_contiguous() for t in (weight, upper, lower)):
        raise ValueError("the weight and its halves must be contiguous")


def _kernels() -> ModuleType:
    from sglang_morph.precision.nested import triton_kernels

    return triton_kernels
