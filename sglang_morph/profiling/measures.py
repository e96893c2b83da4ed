"""How far hidden states and next-token distributions are apart."""

from __future__ import annotations

import torch
from torch.nn.functional import kl_div, log_softmax

from sglang_morph.profiling.model import LayeredModel

CHUNK_TOKENS = 256
"""Tokens whose logits exist at once."""


def cosine_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """1 - cos of the last axis, the mean over all others; `[..., H]`.

    From the difference of the directions: 1 - cos itself would vanish in float32's rounding.
    """
    total = 0.0
    for x, y in zip(a.flatten(0, -2).split(4096), b.flatten(0, -2).split(4096), strict=True):
        difference = _direction(x) - _direction(y)
        total += float(difference.square().sum(dtype=torch.float64)) / 2
    return total / a.shape[:-1].numel()


def _direction(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


class Divergence:
    """KL of next-token distributions from those of a reference, in nats, the mean over tokens."""

    def __init__(self, model: LayeredModel, reference: torch.Tensor) -> None:
        """`reference`: the last layer's output `[B, T, H]`."""
        self._model = model
        self._expected = [self._log_probabilities(part) for part in _chunks(reference)]

    def __call__(self, output: torch.Tensor) -> float:
        """Of the last layer's output, of the reference's shape."""
        total = 0.0
        for expected, part in zip(self._expected, _chunks(output), strict=True):
            found = self._log_probabilities(part)
            per_token = kl_div(found, expected, log_target=True, reduction="none").sum(-1)
            total += float(per_token.sum(dtype=torch.float64))
        return total / output.shape[:-1].numel()

    def _log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        return log_softmax(self._model.logits(hidden).float(), dim=-1)


def _chunks(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return hidden.flatten(0, -2).split(CHUNK_TOKENS)
