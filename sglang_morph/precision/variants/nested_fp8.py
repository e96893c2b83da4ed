"""`nested_fp8`: the upper halves of the nested encoding; computed in torch, on a CPU."""

from __future__ import annotations

import torch

from sglang_morph.precision.nested.cpu_kernels import upper_linear
from sglang_morph.precision.nested.encoding import (
    Exceptions,
    Nesting,
    choose_nesting,
    find_exceptions,
    patch_exceptions,
    upper_as_float,
)
from sglang_morph.precision.nested.ops import merge_into, split_into
from sglang_morph.precision.quantizers.base import Quantizer, check_weight
from sglang_morph.precision.variants.base import NestedVariant, Parts, Variant, finish, rows_of
from sglang_morph.precision.variants.fp8 import Fp8, fp8_parts


class NestedFp8(NestedVariant):
    """About as fast as full precision in float32: half the memory is read, then converted.

    Parts: `codes` `[N, K]`, the upper halves, float8_e4m3fn or float8_e5m2 by nesting, and
    `scales` float32 `[N]`, all the same: weight = code * scale. Kept as a part, because GEMMs read
    one scale per row from memory.
    """

    name = "nested_fp8"
    kernel = "torch (dequantized at every call)"
    stand_in: type[Variant] = Fp8
    """Takes the weights that cannot be nested."""

    def __init__(self, quantizer: Quantizer, nesting: Nesting = Nesting.E4M3) -> None:
        super().__init__(quantizer)
        self.nesting = nesting

    def supports(self, rows: int, columns: int) -> str | None:
        if columns % 2:
            return f"nested_fp8 needs an even K, not {columns}"
        return index_obstacle(rows, columns)

    def for_weight(self, weight: torch.Tensor) -> Variant:
        check_weight(weight, self.nominal_bits, weight.shape[-1])
        nesting = choose_nesting(weight)
        if nesting is Nesting.NONE:
            return self.stand_in(self._quantizer)
        return type(self)(self._quantizer, nesting)

    def empty_parts(
        self, rows: int, columns: int, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        return fp8_parts(rows, columns, self.nesting.dtype, device)

    def derive(self, full: torch.Tensor, out: Parts) -> None:
        split_into(full, out["codes"].view(torch.uint8), None, self.nesting)
        out["scales"].fill_(self.nesting.scale)

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        self._check_nesting(weight)
        return super().encode(weight)

    def residual(self, full: torch.Tensor) -> dict[str, torch.Tensor]:
        self._check_nesting(full)
        full = full.contiguous()
        upper, lower = (torch.empty_like(full, dtype=torch.uint8) for _ in range(2))
        split_into(full, upper, lower, self.nesting)
        exceptions = find_exceptions(full)
        parts = {"lower": lower}
        if exceptions.index.numel():
            parts |= {"exception_index": exceptions.index, "exception_bits": exceptions.bits}
        return parts

    def rebuild(self, parts: Parts, residual: Parts, out: torch.Tensor) -> None:
        merge_into(parts["codes"].view(torch.uint8), residual["lower"], out, self.nesting)
        self.patch(residual, out)

    def patch(self, residual: Parts, out: torch.Tensor) -> None:
        if "exception_index" in residual:
            found = Exceptions(residual["exception_index"], residual["exception_bits"])
            patch_exceptions(out, found)

    def reference(self, weight: torch.Tensor) -> torch.Tensor:
        return upper_as_float(weight, self.nesting)

    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = upper_linear(parts["codes"].view(torch.uint8), rows_of(x, torch.float32), self.nesting)
        return finish(y, x, bias)

    def _check_nesting(self, weight: torch.Tensor) -> None:
        nesting = choose_nesting(weight)
        # What fits E4M3 fits E5M2 as well, only not as closely.
        if nesting is Nesting.NONE or (nesting, self.nesting) == (Nesting.E5M2, Nesting.E4M3):
            raise ValueError(
                f"this {weight.dtype} weight cannot be nested as {self.nesting.value}; "
                "use what `for_weight` returns for it"
            )


def index_obstacle(rows: int, columns: int) -> str | None:
    """Why exceptions of a `[rows, columns]` weight could not be listed; None if they can."""
    if rows * columns > torch.iinfo(torch.int32).max:
        return f"nested_fp8 takes weights of less than 2**31 elements, not {rows} x {columns}"
    return None
