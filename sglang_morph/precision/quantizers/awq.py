"""AWQ: activation-aware weight quantization (Lin et al., MLSys 2024), as its paper describes it.

Input channels with large activations are scaled up before rounding, which makes their rounding
errors relatively smaller, and what feeds them is scaled down: the norm, or the linear before. Then
every group's range is clipped where that lowers the error of the outputs; unlike in the paper, its
two ends apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from sglang_morph.precision.names import NORMS
from sglang_morph.precision.quantizers.layer import LayerQuantizer, LayerWeights, Variants
from sglang_morph.precision.quantizers.statistics import InputStatistics
from sglang_morph.precision.variants.base import Variant

GRID = 20
"""Steps of the exponent between 0 (no scaling) and 1 (by the whole mean magnitude)."""
SHARES = tuple(1 - step / 16 for step in range(9))
"""Of the ends of a group's range: where clipping tries to put them."""
_BOTH_ENDS, _LOW_END, _HIGH_END = slice(0, 2), slice(0, 1), slice(1, 2)
SEARCH_ROWS = 2048
"""Of a weight with more rows, so many, evenly spaced, stand for all when scales are searched."""

_QKV, _O = "self_attn.qkv_proj", "self_attn.o_proj"
_GATE_UP, _DOWN = "mlp.gate_up_proj", "mlp.down_proj"
_LINEAR_BEFORE = {_O: _QKV, _DOWN: _GATE_UP}
"""Linear -> the one whose last rows yield its inputs, channel by channel: those of v, and of up."""


class Awq(LayerQuantizer):
    """Queries and keys are scaled but not clipped: their errors are multiplied with each other."""

    name = "awq"
    needs_inputs = True

    def adapt(
        self,
        layer: LayerWeights,
        variants: Variants,
        inputs: Mapping[str, InputStatistics] | None = None,
    ) -> LayerWeights:
        inputs = self.needed(inputs)
        scaled = layer
        scales = {path: torch.ones_like(found.magnitude) for path, found in inputs.items()}
        for path, weight in layer.linears.items():
            if _is_scalable(layer, path):
                # Scaling rows commutes with rounding them, so the search sees the rows as loaded.
                wanted = search_scales(weight, variants[path], inputs[path])
                scaled, scales[path] = scale_inputs(scaled, path, wanted)
        clipped = {
            path: _clip(scaled.linears, path, variants[path], inputs[path].scaled(scales[path]))
            for path in scaled.linears
        }
        return replace(scaled, linears=clipped)


def search_scales(weight: torch.Tensor, variant: Variant, inputs: InputStatistics) -> torch.Tensor:
    """float32 `[K]`: the factors for the columns of `weight` that cost the outputs least error.

    They are the mean magnitude of the inputs to a power between 0 and 1.
    """
    count = weight.shape[0]
    sample = torch.linspace(0, count - 1, min(count, SEARCH_ROWS)).long()
    rows = weight[sample.to(weight.device)].float()
    candidates = list(_candidates(inputs.mean_magnitude))
    errors = [
        inputs.output_error(variant.reference((rows * scales).to(weight.dtype)) / scales - rows)
        for scales in candidates
    ]
    return candidates[errors.index(min(errors))]


def _candidates(magnitude: torch.Tensor) -> Iterator[torch.Tensor]:
    # A channel that calibration never reached must not be scaled to nothing.
    magnitude = magnitude.clamp_min(magnitude.max().clamp_min(1e-6) * 1e-4)
    for step in range(GRID + 1):
        scales = magnitude ** (step / GRID)
        yield scales / (scales.max() * scales.min()).sqrt()


def scale_inputs(
    layer: LayerWeights, path: str, scales: torch.Tensor
) -> tuple[LayerWeights, torch.Tensor]:
    """`layer` with the inputs of linear `path` divided by `scales` and its columns multiplied.

    Returns the scales as used as well: a norm's rounding to its dtype is made up for in them.
    """
    weight = layer.linears[path].float()
    dtype = layer.linears[path].dtype
    if path in NORMS:
        norm = layer.norms[NORMS[path]]
        divided = (norm.float() / scales).to(norm.dtype)
        used = torch.where(divided == 0, scales, norm.float() / divided.float())
        norms = {**layer.norms, NORMS[path]: divided}
        linears = {**layer.linears, path: (weight * used).to(dtype)}
        return replace(layer, linears=linears, norms=norms), used
    before = layer.linears[_LINEAR_BEFORE[path]].clone()
    rows = before[-weight.shape[1] :]
    rows.copy_(rows.float() / scales.unsqueeze(-1))
    linears = {**layer.linears, _LINEAR_BEFORE[path]: before, path: (weight * scales).to(dtype)}
    return replace(layer, linears=linears), scales


def _is_scalable(layer: LayerWeights, path: str) -> bool:
    """Whether something before the linear can make up for a scaling of its inputs."""
    if path in NORMS:
        return NORMS[path] in layer.norms
    before = _LINEAR_BEFORE[path]
    if before in layer.fixed_rows:
        return False
    if path == _DOWN:
        return True
    # With fewer KV heads than heads a row of v feeds several columns of o.
    rows, channels = layer.linears[before].shape[0], layer.linears[path].shape[1]
    return rows == 3 * channels


def search_clipping(
    weight: torch.Tensor, variant: Variant, inputs: InputStatistics
) -> torch.Tensor:
    """`weight` with the ends of every group's range moved to where the outputs' error is least.

    First both ends move together, then each by itself: with a zero point of its own a group gains
    from every code that is not spent on one far weight. A group's error counts by itself, as if the
    others had none.
    """
    rows, columns = weight.shape
    blocks = inputs.gram_blocks(variant.group_size(columns))
    grouped = weight.float().view(rows, len(blocks), -1)
    ends = torch.stack((grouped.amin(-1), grouped.amax(-1)))
    shares = torch.ones_like(ends)
    best, least = weight, _group_errors(weight, weight, variant, blocks)
    for moving, share in itertools.product((_BOTH_ENDS, _LOW_END, _HIGH_END), SHARES):
        moved = shares.clone()
        moved[moving] = share
        low, high = (ends * moved).unsqueeze(-1)
        clipped = grouped.clamp(low, high).view(rows, columns).to(weight.dtype)
        errors = _group_errors(clipped, weight, variant, blocks)
        better = errors < least
        shares, least = torch.where(better, moved, shares), torch.minimum(errors, least)
        by_column = better.repeat_interleave(columns // len(blocks), dim=1)
        best = torch.where(by_column, clipped, best)
    return best


def _group_errors(
    candidate: torch.Tensor, weight: torch.Tensor, variant: Variant, blocks: torch.Tensor
) -> torch.Tensor:
    """float32 `[N, groups]`: what `candidate`, once rounded, adds to the outputs' squared error."""
    difference = variant.reference(candidate).sub_(weight.float())
    by_group = difference.view(len(weight), len(blocks), -1).transpose(0, 1)
    return (torch.bmm(by_group, blocks) * by_group).sum(dim=-1).t()


def _clip(
    linears: Mapping[str, torch.Tensor], path: str, variant: Variant, inputs: InputStatistics
) -> torch.Tensor:
    weight = linears[path]
    clipped = search_clipping(weight, variant, inputs)
    if path != _QKV:
        return clipped
    values = (weight.shape[0] - linears[_O].shape[1]) // 2
    return torch.cat((weight[:-values], clipped[-values:]))
