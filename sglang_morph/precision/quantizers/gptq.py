"""GPTQ: codes chosen column by column, each error made up for in the columns not yet rounded
(Frantar et al., ICLR 2023), as its paper describes it.

How much a column can make up for another is told by the second moments of the inputs, the Hessian
of the outputs' squared error. Columns are taken in order; a group's scale and zero are found when
its first column is reached, from the weights as they are by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from sglang_morph.precision.quantizers.base import QuantizedWeight, check_weight
from sglang_morph.precision.quantizers.integer_zeros import IntegerZeros, quantize_integer_zeros
from sglang_morph.precision.quantizers.layer import (
    Codes,
    LayerQuantizer,
    LayerWeights,
    Variants,
)
from sglang_morph.precision.quantizers.rtn import RoundToNearest
from sglang_morph.precision.quantizers.statistics import InputStatistics
from sglang_morph.precision.variants.base import IntegerZerosVariant, QuantizedVariant, Variant

DAMPING = (0.01, 0.1, 1.0)
"""Of the mean of the Hessian's diagonal, added to all of it; more where the first is too little."""
BLOCK = 128
"""Columns after which the errors so far are passed on to all columns behind, in one product."""

RoundGroup = Callable[[torch.Tensor], Codes]
"""float32 `[N, group]` to its codes, of which scales and zeros are taken."""


class Gptq(LayerQuantizer):
    """Norms stay as they are, and so do the weights: only the codes are others."""

    name = "gptq"
    needs_inputs = True

    def adapt(
        self,
        layer: LayerWeights,
        variants: Variants,
        inputs: Mapping[str, InputStatistics] | None = None,
    ) -> LayerWeights:
        inputs = self.needed(inputs)
        codes = {
            path: choose_codes(weight, variants[path], inputs[path].gram)
            for path, weight in layer.linears.items()
        }
        return replace(layer, codes=codes)


def choose_codes(weight: torch.Tensor, variant: Variant, gram: torch.Tensor) -> Codes:
    """The codes of `weight` `[N, K]` for `variant`, where inputs have the second moments `gram`.

    `gram`: float32 `[K, K]` on the device of `weight`. Raises ValueError for a damaged weight or
    gram, or a variant without codes in groups.
    """
    bits, size = variant.nominal_bits, variant.group_size(weight.shape[-1])
    check_weight(weight, bits, size)
    if isinstance(variant, QuantizedVariant):
        dtype, nearest = variant.parameter_dtype, RoundToNearest()
        return with_feedback(
            weight, gram, bits, size, lambda group: nearest.quantize(group, bits, size, dtype)
        )
    if isinstance(variant, IntegerZerosVariant):
        return with_feedback(
            weight,
            gram,
            bits,
            size,
            lambda group: quantize_integer_zeros(group.to(weight.dtype), bits, size),
        )
    raise ValueError(f"{variant.name} has no codes for gptq to choose; use rtn for it")


def with_feedback(
    weight: torch.Tensor, gram: torch.Tensor, bits: int, group_size: int, round_group: RoundGroup
) -> Codes:
    """`weight` `[N, K]` in codes of `bits`, in groups of `group_size` columns."""
    factor = inverse_factor(gram)
    # Transposed, so that a column of the weight is contiguous.
    work = weight.float().t().contiguous()
    codes = torch.empty_like(work, dtype=torch.uint8)
    groups: list[Codes] = []
    block = max(BLOCK, group_size)
    for begin in range(0, len(work), block):
        end = min(begin + block, len(work))
        errors = torch.empty_like(work[begin:end])
        for column in range(begin, end):
            if column % group_size == 0:
                groups.append(round_group(work[column : column + group_size].t()))
                scale, lowest = _grid(groups[-1])
            now = work[column]
            code = ((now - lowest) / scale).round_().clamp_(0, (1 << bits) - 1)
            codes[column] = code
            error = (now - lowest - code * scale) / factor[column, column]
            work[column + 1 : end].addr_(factor[column, column + 1 : end], error, alpha=-1)
            errors[column - begin] = error
        work[end:].addmm_(factor[begin:end, end:].t(), errors, alpha=-1)
    return _joined(codes.t().contiguous(), groups)


def inverse_factor(gram: torch.Tensor) -> torch.Tensor:
    """Upper triangular `U` `[K, K]` with `U^T U` the inverse of `gram`, damped.

    A column that no input ever reached has a row and column of zeros there; damping gives it an
    inverse of its own, so that it is rounded to nearest and makes up for nothing. Raises ValueError
    where no damping helps.
    """
    mean = gram.diagonal().mean().clamp_min(1e-12)
    for share in DAMPING:
        damped = gram.clone()
        damped.diagonal().add_(share * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and torch.isfinite(upper).all():
                return upper
    raise ValueError("what the linear read in calibration is not finite; the checkpoint is damaged")


def _grid(group: Codes) -> tuple[torch.Tensor, torch.Tensor]:
    """What a code means, `code * scale + lowest`: two float32 `[N]`."""
    scale, zero = group.scales.float().flatten(), group.zeros.float().flatten()
    if isinstance(group, IntegerZeros):
        return scale, -zero * scale
    return scale, zero - group.midpoint * scale


def _joined(codes: torch.Tensor, groups: list[Codes]) -> Codes:
    scales = torch.cat([group.scales for group in groups], dim=1)
    zeros = torch.cat([group.zeros for group in groups], dim=1)
    first = groups[0]
    if isinstance(first, QuantizedWeight):
        return QuantizedWeight(codes, scales, zeros, first.bits, first.group_size)
    return IntegerZeros(codes, scales, zeros)
