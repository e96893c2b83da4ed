"""fp8 and nested_fp8 on a GPU: SGLang's own activation quantizer and FP8 GEMM (SM89 and newer).

W8A8: every token's activations get a scale of their own when they come in.
"""

from __future__ import annotations

import torch
from sgl_kernel import fp8_scaled_mm
from sglang.kernels.ops.quantization import sgl_per_token_quant_fp8
from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_quant_fp8

from sglang_morph.precision.nested import full_linear, merge_gemm
from sglang_morph.precision.nested.encoding import Nesting
from sglang_morph.precision.nested.ops import exception_starts, patch_rows
from sglang_morph.precision.variants.base import Halves, Loaded, Parts, finish
from sglang_morph.precision.variants.fp8 import Fp8
from sglang_morph.precision.variants.nested_fp8 import NestedFp8, index_obstacle

W8A8_TOLERANCE = 0.05
"""Rounding activations to E4M3 costs 0.027 where they are Gaussian."""


class Fp8Cuda(Fp8):
    """Derived by the kernel that quantizes activations: a row of a weight is like a token."""

    kernel = "sgl_kernel.fp8_scaled_mm"
    tolerance = W8A8_TOLERANCE

    def supports(self, rows: int, columns: int) -> str | None:
        return _shape_obstacle(rows, columns)

    def derive(self, full: torch.Tensor, out: Parts) -> None:
        sgl_per_token_quant_fp8(full, out["codes"], out["scales"])

    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _linear_w8a8(parts, x, bias)


class NestedFp8Cuda(NestedFp8):
    """E4M3 halves in SGLang's GEMM; E5M2 ones in cuBLAS, which alone takes E4M3 times E5M2."""

    tolerance = W8A8_TOLERANCE
    stand_in = Fp8Cuda

    @property
    def kernel(self) -> str:  # type: ignore[override]
        e5m2 = self.nesting.dtype == torch.float8_e5m2
        return "torch._scaled_mm (E5M2)" if e5m2 else "sgl_kernel.fp8_scaled_mm"

    def supports(self, rows: int, columns: int) -> str | None:
        return _shape_obstacle(rows, columns) or index_obstacle(rows, columns)

    def patch(self, residual: Parts, out: torch.Tensor) -> None:
        patch_rows(out, residual, 0)

    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if parts["codes"].dtype == torch.float8_e5m2:
            return _linear_e5m2(parts, x, bias)
        return _linear_w8a8(parts, x, bias)

    def residual(self, full: torch.Tensor) -> dict[str, torch.Tensor]:
        """Also `exception_starts`, as `ops.patch_rows` takes them."""
        parts = super().residual(full)
        if "exception_index" in parts:
            parts["exception_starts"] = exception_starts(parts["exception_index"], *full.shape)
        return parts

    def merged_obstacle(self, rows: int, columns: int) -> str | None:
        return merge_gemm.supports(rows, columns)

    def prepare_merged(self, weight: torch.Tensor) -> None:
        case = (tuple(weight.shape), weight.dtype, weight.device, self.nesting)
        if case not in _TRIED:
            full_linear.try_on(weight, self.nesting)
            _TRIED.add(case)

    def merged_rows(self, rows: int, columns: int, itemsize: int) -> int:
        return full_linear.block_rows(rows, columns, itemsize)

    def merged_linear(
        self, halves: Halves, x: torch.Tensor, bias: torch.Tensor | None, loaded: Loaded
    ) -> torch.Tensor:
        """By kernels of its own: `loaded` is not called."""
        y = full_linear.full_linear(
            halves.parts["codes"].view(torch.uint8),
            halves.residual,
            x.reshape(-1, x.shape[-1]),
            bias,
            self.nesting,
            halves.scratch,
        )
        return y.view(*x.shape[:-1], y.shape[-1])


_TRIED: set[tuple[tuple[int, ...], torch.dtype, torch.device, Nesting]] = set()
"""Weights that the merge GEMM computed rightly with."""


def _shape_obstacle(rows: int, columns: int) -> str | None:
    if columns % 16:
        return f"fp8 on a GPU needs K divisible by 16, not {columns}"
    if rows % 16:
        return f"fp8 on a GPU needs N divisible by 16, not {rows}"
    return None


def _linear_w8a8(parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    tokens = x.reshape(-1, x.shape[-1])
    if tokens.shape[0] == 0:
        return _no_tokens(parts, x)
    codes, scales = sglang_per_token_quant_fp8(tokens.contiguous())
    weight_scales = parts["scales"].unsqueeze(-1)
    y = fp8_scaled_mm(codes, parts["codes"].t(), scales, weight_scales, x.dtype, bias)
    return y.view(*x.shape[:-1], y.shape[-1])


def _linear_e5m2(parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """cuBLAS wants one scale for all tokens with these types, so theirs are applied afterwards."""
    tokens = x.reshape(-1, x.shape[-1])
    if tokens.shape[0] == 0:
        return _no_tokens(parts, x)
    codes, scales = sglang_per_token_quant_fp8(tokens.contiguous())
    one = parts["scales"][0]  # E5M2 halves are the weight itself: every scale is 1
    y = torch._scaled_mm(
        codes, parts["codes"].t(), scale_a=one, scale_b=one, out_dtype=torch.float32
    )
    return finish(y.mul_(scales), x, bias)


def _no_tokens(parts: Parts, x: torch.Tensor) -> torch.Tensor:
    """The kernels do not take empty batches."""
    return x.new_empty(*x.shape[:-1], parts["codes"].shape[0])
