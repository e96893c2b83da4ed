"""The linear of a nested weight at full precision, from its two halves, on a GPU.

Up to `merge_gemm.MAX_TOKENS` tokens one kernel merges and multiplies. It takes the weight as fp16
holds it: the exceptions of a bf16 weight are off by at most 2**-25 there, which is less than a
hundredth of what rounding the result costs even if 1% of the weights were exceptions. With more
tokens the weight is merged into scratch memory, exceptions included, and cuBLAS multiplies.

Which way is taken depends on the number of tokens alone, so it is the same in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import linear

from sglang_morph.precision.nested import merge_gemm
from sglang_morph.precision.nested.encoding import Nesting, find_exceptions
from sglang_morph.precision.nested.merge_gemm import MergeGemmError
from sglang_morph.precision.nested.ops import (
    exception_starts,
    merge_into,
    patch_rows,
    split_into,
)

BLOCK_BYTES = 256 << 20
"""Of a weight that is merged at a time, so that scratch memory has a bound. Blocks that stay in the
L2 cache are slower: a GEMM by so few rows fills the GPU badly."""
ROW_STEP = 128
"""Rows of a block are a multiple of this, the side of a tile."""

TRIAL_BATCHES = (1, 17, 33, 65, 129, merge_gemm.MAX_TOKENS, merge_gemm.MAX_TOKENS + 1)
TRIAL_ERROR = 0.01
"""Of the result's norm; bf16 and the order of the sums cost 0.003."""

Residual = Mapping[str, torch.Tensor]


def block_rows(rows: int, columns: int, itemsize: int) -> int:
    """Rows of a `[rows, columns]` weight that are merged at a time."""
    blocks = max(1, round(rows * columns * itemsize / BLOCK_BYTES))
    step = -(-rows // (blocks * ROW_STEP)) * ROW_STEP
    return min(rows, step)


def full_linear(
    upper: torch.Tensor,
    residual: Residual,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    nesting: Nesting,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """`x [M, K] @ weight.T + bias`, `[M, N]` in the dtype of `x`.

    `upper`, and `lower` in `residual`: uint8 `[N, K]`, contiguous; the exceptions as `patch_rows`
    takes them. `scratch`: `[R, K]`, contiguous, in the dtype of the weight and of `x`. Only
    enqueues, on the current stream.
    """
    if len(x) > merge_gemm.MAX_TOKENS:
        return _in_blocks(upper, residual, x, bias, nesting, scratch)
    y = merge_gemm.merge_gemm(upper, residual["lower"], x, nesting)
    return y if bias is None else y.add_(bias)


def _in_blocks(
    upper: torch.Tensor,
    residual: Residual,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    nesting: Nesting,
    scratch: torch.Tensor,
) -> torch.Tensor:
    rows = len(upper)
    y = x.new_empty(len(x), rows)
    if bias is not None:
        y.copy_(bias)
    for start in range(0, rows, len(scratch)):
        block = slice(start, min(start + len(scratch), rows))
        weight = scratch[: block.stop - start]
        _merge_rows(upper, residual, weight, start, nesting)
        # cuBLAS writes into the columns of y in place: only their stride is larger than their width
        if bias is None:
            torch.mm(x, weight.t(), out=y[:, block])
        else:
            y[:, block].addmm_(x, weight.t())
    return y


def _merge_rows(
    upper: torch.Tensor, residual: Residual, weight: torch.Tensor, first: int, nesting: Nesting
) -> None:
    """See `merge_gemm.merge_rows`; by torch's operations on a CPU."""
    if weight.is_cuda:
        merge_gemm.merge_rows(upper, residual, weight, first, nesting)
        return
    block = slice(first, first + len(weight))
    merge_into(upper[block], residual["lower"][block], weight, nesting)
    patch_rows(weight, residual, first)


def try_on(weight: torch.Tensor, nesting: Nesting) -> None:
    """Build the kernels, and compute with the halves of `weight` (`[N, K]`, on its GPU).

    Raises `MergeGemmError` where they cannot be had, fail, or compute something else. Takes a few
    times the weight in memory, and waits for the device.
    """
    merge_gemm.prepare(weight.device, weight.dtype)
    try:
        halves = _halves(weight, nesting)
        errors = [_error(weight, *halves, nesting, batch) for batch in TRIAL_BATCHES]
    except Exception as failure:
        cause = str(failure).partition("\n")[0]
        raise MergeGemmError(f"the merge GEMM failed: {cause}; {_REMEDY}") from failure
    for batch, error in zip(TRIAL_BATCHES, errors, strict=True):
        if not error <= TRIAL_ERROR:  # also where it is NaN
            raise MergeGemmError(
                f"the merge GEMM is off by {error:.3f} of the result's norm with {batch} tokens "
                f"and a weight of {list(weight.shape)}, allowed are {TRIAL_ERROR}; {_REMEDY}"
            )


def _halves(weight: torch.Tensor, nesting: Nesting) -> tuple[torch.Tensor, Residual]:
    upper, lower = (torch.empty_like(weight, dtype=torch.uint8) for _ in range(2))
    split_into(weight, upper, lower, nesting)
    exceptions = find_exceptions(weight)
    return upper, {
        "lower": lower,
        "exception_index": exceptions.index,
        "exception_bits": exceptions.bits,
        "exception_starts": exception_starts(exceptions.index, *weight.shape),
    }


def _error(
    weight: torch.Tensor, upper: torch.Tensor, residual: Residual, nesting: Nesting, batch: int
) -> float:
    """Relative error (Frobenius) against the full weight, with random activations."""
    rows, columns = weight.shape
    scratch = weight.new_empty(block_rows(rows, columns, weight.itemsize), columns)
    generator = torch.Generator(weight.device).manual_seed(batch)
    x = torch.randn(batch, columns, generator=generator, device=weight.device).to(weight.dtype)
    expected = linear(x, weight).float()
    y = full_linear(upper, residual, x, None, nesting, scratch).float()
    return float((y - expected).norm() / expected.norm().clamp_min(_TINY))


_REMEDY = "use --memory-backend layer_swap"
_TINY = torch.finfo(torch.float32).tiny
