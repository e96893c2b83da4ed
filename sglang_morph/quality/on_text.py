"""How well a level predicts a text, position by position, against full precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_morph.precision.names import FULL
from sglang_morph.quality.lowered import LayerVariants, LoweredModel
from sglang_morph.quality.metrics import kl_divergence

_ROWS = 256
"""Positions whose logits are held at a time, beside full precision's, which are kept."""

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class TextScores:
    """One number for each block and predicted position, `[B, T - 1]`."""

    losses: Array
    """Negative log-likelihood of the text's next token, nats."""
    kl: Array
    """KL(full || level) of the next-token distributions, nats."""
    same_top: Array
    """Whether the likeliest token is full precision's."""


class TextMeter:
    """Measures levels on the same blocks of tokens; full precision first, to compare with.

    Keeps full precision's log-probabilities (4 bytes x positions x vocabulary), and the hidden
    states before every layer as of the last level, so that the next one starts at the first layer
    that differs.
    """

    def __init__(self, lowered: LoweredModel, blocks: Sequence[Sequence[int]]) -> None:
        """`blocks`: `[B, T]` token ids, T above 1."""
        self._lowered = lowered
        self._tokens = torch.tensor(blocks)
        self._states: list[torch.Tensor] = []
        self._states_of: tuple[str, ...] = ()
        full = (FULL,) * lowered.model.num_layers
        self._full = list(self._log_probabilities(full))

    def measure(self, variants: LayerVariants) -> TextScores:
        """Leaves the model at `variants`."""
        targets = self._tokens[:, 1:].flatten().split(_ROWS)
        losses, kl, same = [], [], []
        for p, q, target in zip(
            self._full, self._log_probabilities(variants), targets, strict=True
        ):
            losses.append(-np.take_along_axis(q, target.numpy()[:, None], axis=-1)[:, 0])
            kl.append(kl_divergence(p, q))
            same.append(p.argmax(axis=-1) == q.argmax(axis=-1))
        return TextScores(*(self._by_block(rows) for rows in (losses, kl, same)))

    def _by_block(self, rows: Sequence[Array]) -> Array:
        return np.concatenate(rows).reshape(len(self._tokens), -1)

    def _log_probabilities(self, variants: LayerVariants) -> Iterator[npt.NDArray[np.float32]]:
        """`[B * (T - 1), vocabulary]` in pieces of `_ROWS`."""
        hidden = self._last_hidden(tuple(variants))[:, :-1].flatten(0, 1)
        for rows in hidden.split(_ROWS):
            logits = self._lowered.model.logits(rows)
            yield logits.float().log_softmax(dim=-1).cpu().numpy()

    def _last_hidden(self, variants: tuple[str, ...]) -> torch.Tensor:
        self._lowered.lower(variants)
        model = self._lowered.model
        pairs = zip(variants, self._states_of, strict=False)
        start = next((i for i, (a, b) in enumerate(pairs) if a != b), len(self._states_of))
        states = self._states[: start + 1] or [model.embed(self._tokens)]
        for layer in range(len(states) - 1, model.num_layers):
            states.append(model.layer(layer, states[-1]))
        self._states, self._states_of = states, variants
        return states[-1]
