"""What makes a layer harmful: MorphServe's Layer Importance Score, and KL divergence.

Both are asked within a *stage*: the layers take one variant, one after another, each from what it
has in the state in which the stage begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sglang_morph.profiling.evaluations import Evaluations
from sglang_morph.profiling.measures import Divergence, cosine_distance
from sglang_morph.profiling.model import Weights
from sglang_morph.profiling.trajectory import Trajectory

_MIB = 1 << 20

Measure = Callable[[torch.Tensor], float]


@dataclass(frozen=True, slots=True)
class LisWeights:
    """Shares of the three similarities; none is negative."""

    transformation: float = 0.25
    """LTS: of what goes into a layer and what comes out of it."""
    replacement: float = 0.25
    """LRS: of what the layer yields before and after the exchange."""
    model: float = 0.5
    """MDS: of what the model yields before and after the exchange."""


class Stage:
    """All layers take `variant`. Values that are known already are not computed again."""

    def __init__(
        self,
        variant: str,
        weights: Sequence[Weights],
        trajectory: Trajectory,
        evaluations: Evaluations,
    ) -> None:
        """`weights`: by layer, what the variant stands for."""
        self.variant = variant
        self.trajectory = trajectory
        self._weights = weights
        self._evaluations = evaluations
        self._exchanged: list[int] = []

    @property
    def num_layers(self) -> int:
        return len(self._weights)

    def move_to(self, chosen: Sequence[int]) -> None:
        """Exchange the layers of `chosen`, which goes on from what was chosen before."""
        for layer in chosen[len(self._exchanged) :]:
            self.trajectory.exchange(layer, self._weights[layer])
            self._exchanged.append(layer)

    def value(self, kind: str, layer: int | None, compute: Callable[[], float]) -> float:
        """`compute()` in the state in which the stage begins, unless known already."""
        known = self._evaluations.get(self.variant, kind, (), layer)
        if known is not None:
            return known
        return self._kept(kind, (), layer, compute())

    def values(
        self,
        kind: str,
        chosen: Sequence[int],
        layers: Sequence[int],
        measure: Callable[[], Measure],
        harm: Callable[[int, float], float],
    ) -> list[float]:
        """`measure()` of the model's output with `chosen` and each of `layers` exchanged.

        `measure` is called when `chosen` have been, to see that state; `harm` ranks the values.
        """
        before = tuple(chosen)
        get = partial(self._evaluations.get, self.variant, kind, before)
        missing = [layer for layer in layers if get(layer) is None]
        if missing:
            self.move_to(chosen)
            weights = {layer: self._weights[layer] for layer in missing}
            for layer, value in self.trajectory.trials(weights, measure(), harm).items():
                self._kept(kind, before, layer, value)
        return [found for layer in layers if (found := get(layer)) is not None]

    def exchanged(self, layer: int) -> torch.Tensor:
        """What `layer` yields after the exchange, from the input it has now."""
        return self.trajectory.with_layer(layer, self._weights[layer])

    def _kept(self, kind: str, chosen: tuple[int, ...], layer: int | None, value: float) -> float:
        calls = self.trajectory.layer_calls
        self._evaluations.put(self.variant, kind, chosen, layer, value, calls)
        return value


class LisScorer:
    """1 - LIS, with weights that need not add up to 1: harm is the weighted sum of 1 - similarity.

    Similarities are cosines, the mean over tokens. LTS and LRS are measured in the state in which
    the stage begins, MDS on the model's hidden states after the final norm. As no distance is
    negative, the first two are a floor.
    """

    def __init__(self, stage: Stage, weights: LisWeights) -> None:
        self._stage = stage
        self._weights = weights
        self._floors = [self._floor(layer) for layer in range(stage.num_layers)]

    def floor(self, layer: int) -> float:
        return self._floors[layer]

    def harms(self, chosen: Sequence[int], layers: Sequence[int]) -> list[float]:
        found = self._stage.values("mds", chosen, layers, self._to_present, self._harm)
        return [self._harm(layer, value) for layer, value in zip(layers, found, strict=True)]

    def _harm(self, layer: int, distance: float) -> float:
        return self._floors[layer] + self._weights.model * distance

    def _floor(self, layer: int) -> float:
        state = self._stage.trajectory.state
        transformation = self._stage.value(
            "lts", layer, lambda: cosine_distance(state(layer), state(layer + 1))
        )
        replacement = self._stage.value(
            "lrs", layer, lambda: cosine_distance(state(layer + 1), self._stage.exchanged(layer))
        )
        shares = self._weights
        return shares.transformation * transformation + shares.replacement * replacement

    def _to_present(self) -> Measure:
        normed = self._stage.trajectory.model.normed
        present = normed(self._stage.trajectory.output)
        return lambda output: cosine_distance(present, normed(output))


class KlScorer:
    """KL from full precision's next-token distributions that an exchange adds, nats a MiB freed.

    It can be negative: an exchange may happen to make up for others. So there is no floor.
    """

    def __init__(self, stage: Stage, divergence: Divergence, freed_bytes: Sequence[int]) -> None:
        """`freed_bytes`: by layer."""
        self._stage = stage
        self._divergence = divergence
        self._freed = freed_bytes
        begin = stage.value("kl", None, lambda: divergence(stage.trajectory.output))
        self._totals: dict[tuple[int, ...], float] = {(): begin}
        """KL by the layers that have been exchanged, in their order."""

    def floor(self, layer: int) -> float:
        return float("-inf")

    def harms(self, chosen: Sequence[int], layers: Sequence[int]) -> list[float]:
        harm = partial(self._harm, self._totals[tuple(chosen)])
        found = self._stage.values("kl", chosen, layers, lambda: self._divergence, harm)
        for layer, total in zip(layers, found, strict=True):
            self._totals[(*chosen, layer)] = total
        return [harm(layer, total) for layer, total in zip(layers, found, strict=True)]

    def _harm(self, now: float, layer: int, total: float) -> float:
        return (total - now) / (self._freed[layer] / _MIB)
