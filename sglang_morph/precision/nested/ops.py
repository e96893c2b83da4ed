"""Splitting into and merging from memory that exists: Triton on a GPU, torch elsewhere."""

from __future__ import annotations

from types import ModuleType

import torch

from sglang_morph.precision.nested import encoding
from sglang_morph.precision.nested.encoding import Nesting


def split_into(
    weight: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor | None, nesting: Nesting
) -> None:
    """Write the halves of `weight` (float16 or bfloat16) into `upper` and, if given, `lower`.

    All contiguous, of one shape with an even number of elements, on one device, disjoint; the
    halves uint8. On a GPU this only enqueues, on the current stream. Exceptions of bf16 weights
    are not recorded.
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

    Exact but for exceptions of bf16 weights: those are for the caller to patch.
    """
    _check(weight, upper, lower)
    if weight.is_cuda:
        _kernels().merge_into(upper, lower, weight, nesting)
    else:
        weight.copy_(encoding.merge(upper, lower, nesting))


def _check(weight: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor | None) -> None:
    if weight.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"only float16 and bfloat16 weights can be nested, not {weight.dtype}")
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
