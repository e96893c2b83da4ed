"""Greedy orders: again and again the candidate that does the least harm. Plain Python.

Harm is measured by a `Scorer`, which is where the time goes, so a candidate is measured only if it
can still be the best: *floors* below its harm are cheap. Candidates are measured in the order of
their floors, until the next floor lies above the least harm found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Pick:
    """A layer of the order, and the harm it does after those before it."""

    layer: int
    harm: float
    measured: int
    """Candidates measured in its round."""


class Scorer(Protocol):
    """Harm of one more layer; smaller is better."""

    def floor(self, layer: int) -> float:
        """What the layer's harm is never below, whatever has been chosen; -inf if unknown."""

    def harms(self, chosen: Sequence[int], layers: Sequence[int]) -> list[float]:
        """The harm of each of `layers`, alone, when those `chosen` have been lowered already."""


Candidates = Callable[[Sequence[int], Sequence[int]], Sequence[int]]
"""(chosen, remaining) -> which of the remaining may be chosen next."""


def anyone(chosen: Sequence[int], remaining: Sequence[int]) -> Sequence[int]:
    return remaining


def neighbours(chosen: Sequence[int], remaining: Sequence[int]) -> Sequence[int]:
    """Those right before and after the block that has been chosen; at first any."""
    if not chosen:
        return remaining
    return [layer for layer in remaining if layer in (min(chosen) - 1, max(chosen) + 1)]


def greedy_order(
    layers: Sequence[int],
    scorer: Scorer,
    *,
    lazy: bool = False,
    batch: int = 1,
    candidates: Candidates = anyone,
    on_pick: Callable[[Pick], None] = lambda pick: None,
) -> list[Pick]:
    """All of `layers`, the least harmful first; of equal ones the first of `layers`.

    `lazy` takes the harm a layer was last measured to do as a floor. That is exact where harm
    never falls as more is chosen, and an approximation where it does. `batch` candidates are
    measured at once; a larger one may measure more of them, with the same result.
    """
    floors = {layer: scorer.floor(layer) for layer in layers}
    rank = {layer: position for position, layer in enumerate(layers)}
    picks: list[Pick] = []
    while len(picks) < len(layers):
        chosen = [pick.layer for pick in picks]
        remaining = [layer for layer in layers if layer not in chosen]
        harms: dict[int, float] = {}
        waiting = sorted(candidates(chosen, remaining), key=lambda x: (floors[x], rank[x]))
        while waiting and floors[waiting[0]] <= min(harms.values(), default=float("inf")):
            now, waiting = waiting[:batch], waiting[batch:]
            harms |= zip(now, scorer.harms(chosen, now), strict=True)
        best = min(harms, key=lambda layer: (harms[layer], rank[layer]))
        picks.append(Pick(best, harms[best], len(harms)))
        on_pick(picks[-1])
        if lazy:
            floors |= {layer: max(floors[layer], harm) for layer, harm in harms.items()}
    return picks
