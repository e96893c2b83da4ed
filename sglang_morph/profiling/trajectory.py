"""Calibration tokens on their way through a model of which some layers have been exchanged.

Greedy search asks again and again: what comes out if one more layer is exchanged? Everything up to
that layer is as it was, so its input is kept and only what follows is computed. Several such
candidates go through the layers after them together, as one larger batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from sglang_morph.profiling.model import LayeredModel, Weights


class Trajectory:
    """The hidden states of `token_ids` `[B, T]` in `model`, whose layers it exchanges."""

    def __init__(self, model: LayeredModel, token_ids: torch.Tensor) -> None:
        self.model = model
        self.layer_calls = 0
        """Decoder layers computed so far, each over all of `token_ids`."""
        self._states = [model.embed(token_ids)]
        """`[i]` is what goes into layer `i`; as many as are known in the present model."""
        self._best: _Trial | None = None

    def exchange(self, layer: int, weights: Weights) -> None:
        """Compute `layer` with `weights` from now on. The best trial is not computed again."""
        self.model.swap(layer, weights)
        del self._states[layer + 1 :]
        if self._best is not None and self._best.layer == layer:
            self._states += self._best.states
        self._best = None

    def reset(self) -> None:
        """Compute every layer as loaded again."""
        for layer in range(self.model.num_layers):
            self.model.unswap(layer)
        del self._states[1:]
        self._best = None

    def state(self, layer: int) -> torch.Tensor:
        """What goes into `layer`, `[B, T, H]`; that of `num_layers` is what the last one yields."""
        while len(self._states) <= layer:
            index = len(self._states) - 1
            self._states.append(self._computed(index, self._states[index]))
        return self._states[layer]

    @property
    def output(self) -> torch.Tensor:
        return self.state(self.model.num_layers)

    def with_layer(self, layer: int, weights: Weights) -> torch.Tensor:
        """What `layer` yields, `[B, T, H]`, with `weights` and the input it has now."""
        with self.model.replaced(layer, weights):
            return self._computed(layer, self.state(layer))

    def trials(
        self,
        weights: Mapping[int, Weights],
        measure: Callable[[torch.Tensor], float],
        harm: Callable[[int, float], float],
    ) -> dict[int, float]:
        """For each layer of `weights`: `measure` of the last layer's output `[B, T, H]` if that
        layer alone is exchanged besides.

        The least `harm(layer, measured)` since the last `exchange` is the best trial, whose states
        are kept.
        """
        running: dict[int, list[torch.Tensor]] = {}
        for index in range(min(weights), self.model.num_layers):
            if running:
                stacked = torch.cat([states[-1] for states in running.values()])
                outputs = self._computed(index, stacked, len(running)).chunk(len(running))
                for states, output in zip(running.values(), outputs, strict=True):
                    states.append(output)
            if index in weights:
                running[index] = [self.with_layer(index, weights[index])]
        measured = {layer: measure(states[-1]) for layer, states in running.items()}
        for layer, value in measured.items():
            harmed = harm(layer, value)
            if self._best is None or harmed < self._best.harm:
                self._best = _Trial(layer, harmed, running[layer])
        return measured

    def _computed(self, index: int, hidden: torch.Tensor, times: int = 1) -> torch.Tensor:
        self.layer_calls += times
        return self.model.layer(index, hidden)


class _Trial:
    """A candidate, the harm it does, and the states that follow it."""

    def __init__(self, layer: int, harm: float, states: list[torch.Tensor]) -> None:
        self.layer = layer
        self.harm = harm
        self.states = [state.clone() for state in states]
        """Clones: a chunk of a stacked batch would keep all of it alive."""
