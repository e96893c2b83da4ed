"""`fp8`: E4M3 codes with one scale for each output row; computed in torch, for any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from sglang_morph.precision.quantizers.base import check_weight
from sglang_morph.precision.variants.base import DerivedVariant, Parts, Variant

E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class ScaledFp8:
    """A weight quantized elsewhere: weight = code * scale."""

    codes: torch.Tensor
    """float8_e4m3fn `[N, K]`."""
    scales: torch.Tensor
    """float32 `[N]`."""

    def rows(self, index: torch.Tensor) -> ScaledFp8:
        """Of those rows only."""
        codes = self.codes.view(torch.uint8)[index].view(torch.float8_e4m3fn)
        return ScaledFp8(codes, self.scales[index])

    def dequantize(self) -> torch.Tensor:
        """float32 `[N, K]`."""
        return self.codes.float() * self.scales.unsqueeze(-1)


class Fp8(DerivedVariant):
    """Right, but slower than full precision: the weight is rebuilt in float32 at every call.

    Parts: `codes` float8_e4m3fn `[N, K]`, `scales` float32 `[N]`; weight = code * scale.
    """

    name = "fp8"
    kernel = "torch (dequantized at every call)"

    def supports(self, rows: int, columns: int) -> str | None:
        return None

    def for_weight(self, weight: torch.Tensor) -> Variant:
        check_weight(weight, self.nominal_bits, weight.shape[-1])
        return self

    def empty_parts(
        self, rows: int, columns: int, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        return fp8_parts(rows, columns, torch.float8_e4m3fn, device)

    def derive(self, full: torch.Tensor, out: Parts) -> None:
        codes, scales = quantize_rows(full)
        out["codes"].copy_(codes)
        out["scales"].copy_(scales)

    def reference(self, weight: torch.Tensor) -> torch.Tensor:
        codes, scales = quantize_rows(weight)
        return codes.float() * scales.unsqueeze(-1)

    def linear(self, parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear_in_float(parts, x, bias)


def fp8_parts(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Parts of an 8-bit float weight, without content."""
    return {
        "codes": torch.empty(rows, columns, dtype=dtype, device=device),
        "scales": torch.empty(rows, dtype=torch.float32, device=device),
    }


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn `[M, K]` and float32 scales `[M]`; a row of zeros has scale 0."""
    values = weight.float()
    scales = values.abs().amax(dim=-1) / E4M3_MAX
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    scaled = (values * inverse.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), scales


def linear_in_float(parts: Parts, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`Variant.linear` over parts of `fp8_parts`, in float32, activations not quantized."""
    weight = parts["codes"].float() * parts["scales"].unsqueeze(-1)
    y = linear(x.float(), weight, None if bias is None else bias.float())
    return y.to(x.dtype)
