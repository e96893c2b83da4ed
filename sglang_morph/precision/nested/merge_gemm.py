"""The kernels of a nested weight at full precision: merge and multiply at once, or just merge.

`csrc/merge_gemm.cuh` and `csrc/merge_rows.cuh` say how. For Hopper (SM90), whose asynchronous
tensor cores leave room for merging beside them; compiled when first used (about a minute) and
cached by SGLang's loader.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sglang_morph.precision.nested.encoding import Nesting

logger = logging.getLogger(__name__)

MAX_TOKENS = 1024
"""With more tokens, merging into scratch memory and a plain GEMM are faster."""
CAPABILITY = (9, 0)
_SOURCES = [
    str(Path(__file__).parent / "csrc" / name) for name in ("merge_gemm.cuh", "merge_rows.cuh")
]
_TILE = 128 * 256
"""Elements of the largest tile of the result."""
_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}


class MergeGemmError(RuntimeError):
    """The kernel cannot be had here. One line: the cause, then the remedy."""


@dataclass(frozen=True, slots=True)
class _Workspace:
    """For sums that one block leaves to another. Calls of one device must be of one stream."""

    partials: torch.Tensor
    ready: torch.Tensor


def supports(rows: int, columns: int) -> str | None:
    """Why a `[rows, columns]` weight cannot be multiplied; None if it can."""
    if columns % 64:
        return f"the merge GEMM needs K divisible by 64, not {columns}"
    if rows % 8:
        return f"the merge GEMM needs N divisible by 8, not {rows}"
    return None


def prepare(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Build the kernels, or load what was built before, and make the workspace.

    Raises `MergeGemmError` where that cannot be.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        raise MergeGemmError(
            f"semi_unified's merge GEMM is for Hopper GPUs (SM90), this one is SM{capability[0]}"
            f"{capability[1]}; use --memory-backend layer_swap"
        )
    _workspace(torch.empty(0, device=device).device)  # which names its index, as tensors do
    for nesting in (Nesting.E4M3, Nesting.E5M2):
        _kernels(dtype, nesting)


def merge_gemm(
    upper: torch.Tensor, lower: torch.Tensor, x: torch.Tensor, nesting: Nesting
) -> torch.Tensor:
    """`x [M, K] @ weight.T`, `[M, N]` in the dtype of `x` (bfloat16 or float16), sums in float32.

    `upper` and `lower`: the halves of the weight, uint8 `[N, K]`, contiguous; the weight is what
    they stand for, without exceptions. Only enqueues, on the current stream; may be captured in a
    graph once `prepare` has run. Raises ValueError for what `supports` refuses and for strides that
    16-byte loads cannot take.
    """
    tokens, columns = x.shape
    rows = upper.shape[0]
    if reason := supports(rows, columns):
        raise ValueError(reason)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError(f"x must have rows of 16-byte chunks, not strides {x.stride()}")
    y = x.new_empty(tokens, rows)
    if tokens:
        workspace = _workspace(x.device)
        gemm = _kernels(x.dtype, nesting).merge_gemm
        gemm(upper, lower, x, y, workspace.partials, workspace.ready)
    return y


def merge_rows(
    upper: torch.Tensor,
    residual: Mapping[str, torch.Tensor],
    weight: torch.Tensor,
    first: int,
    nesting: Nesting,
) -> None:
    """Write rows `[first, first + len(weight))` of a weight into `weight`, bit for bit.

    `upper`, and `lower` in `residual`: uint8 `[N, K]`, of a shape that `supports` takes; the
    exceptions as `ops.patch_rows` takes them; `weight`: bfloat16 or float16 `[R, K]`. All
    contiguous. Only enqueues, on the current stream.
    """
    kernels, lower = _kernels(weight.dtype, nesting), residual["lower"]
    if "exception_index" in residual:
        starts, index = residual["exception_starts"], residual["exception_index"]
        bits = residual["exception_bits"]
        kernels.merge_rows_with_exceptions(upper, lower, weight, first, starts, index, bits)
    else:
        kernels.merge_rows(upper, lower, weight, first)


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Functions of the compiled module, under their names there."""

    merge_gemm: Any
    merge_rows: Any
    merge_rows_with_exceptions: Any


@cache
def _workspace(device: torch.device) -> _Workspace:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _Workspace(
        torch.empty(processors, _TILE, dtype=torch.float32, device=device),
        torch.zeros(processors, dtype=torch.int32, device=device),
    )


@cache
def _kernels(dtype: torch.dtype, nesting: Nesting) -> _Kernels:
    from sglang.kernels.jit.utils import load_jit

    arguments = f"{_TYPES[dtype]}, {'true' if nesting is Nesting.E5M2 else 'false'}"
    names = [field.name for field in fields(_Kernels)]
    logger.info("building the merge GEMM for %s, %s, unless it is cached", dtype, nesting.value)
    try:
        module = load_jit(
            "morph_merge_gemm",
            _TYPES[dtype].strip("_"),
            nesting.value,
            external_cuda_files=_SOURCES,
            cuda_wrappers=[(name, f"sglang_morph::{name}<{arguments}>") for name in names],
        )
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MergeGemmError(
            f"semi_unified's merge GEMM could not be built ({first}): install nvcc of CUDA 12.3 or "
            "newer and ninja, or use --memory-backend layer_swap"
        ) from error
    return _Kernels(*(getattr(module, name) for name in names))
