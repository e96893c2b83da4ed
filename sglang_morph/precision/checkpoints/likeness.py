"""Whether quantized weights are those of a model, whatever scaling was moved between them.

Scaling a linear's inputs changes the columns of its weight, and the norm or the rows of the linear
before it. Seen through the norm, directions of rows stay the same; so do directions of columns
where there is no norm. Rounding turns them only a little.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cosine_similarity

from memory_backends.base import TensorMap
from sglang_morph.precision.checkpoints.files import REMEDY
from sglang_morph.precision.names import NORMS
from sglang_morph.precision.quantizers.integer_zeros import IntegerZeros
from sglang_morph.precision.sources import SourceError
from sglang_morph.precision.variants.fp8 import ScaledFp8

SAMPLES = 64
"""Rows or columns of a weight that are compared, evenly spaced."""
LEAST_COSINE = 0.95
"""On average. Rounding to 4 bits leaves about 0.99, weights of another model have about 0."""


def check_alike(
    weight: IntegerZeros | ScaledFp8, own: TensorMap, loaded: TensorMap, path: str, where: str
) -> None:
    """Raises `SourceError`, beginning with `where`, if `weight` is not a rounded form of linear
    `path` in `loaded`. `own` holds the norms that belong to `weight`."""
    full = loaded[f"{path}.weight"]
    if path in NORMS:
        norm = f"{NORMS[path]}.weight"
        rows = _evenly(full.shape[0])
        ours = weight.rows(rows).dequantize() * own[norm].float()
        theirs = full[rows.to(full.device)].float().cpu() * loaded[norm].float().cpu()
    else:
        columns = _evenly(full.shape[1])
        ours = weight.dequantize()[:, columns].t()
        theirs = full[:, columns.to(full.device)].float().cpu().t()
    cosine = float(cosine_similarity(ours, theirs, dim=1).mean())
    if not cosine >= LEAST_COSINE:  # also where it is NaN
        raise SourceError(
            f"{where}: the checkpoint's weight is not that of this model (cosine {cosine:.2f}); "
            f"{REMEDY}"
        )


def _evenly(count: int) -> torch.Tensor:
    return torch.linspace(0, count - 1, min(SAMPLES, count)).long()
