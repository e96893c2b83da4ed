"""The order in which layers take their variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from sglang_morph.precision.plan import fixed_order
from sglang_morph.profiling.evaluations import Evaluations
from sglang_morph.profiling.greedy import Pick, anyone, greedy_order, neighbours
from sglang_morph.profiling.measures import Divergence
from sglang_morph.profiling.model import LayeredModel, Weights
from sglang_morph.profiling.scores import KlScorer, LisScorer, LisWeights, Stage
from sglang_morph.profiling.trajectory import Trajectory

FIXED_ORDERS = ("front", "back", "random")
"""Need no measurement."""
ORDERS = ("lis", "kl", "contiguous", *FIXED_ORDERS)
"""`lis`: greedy by 1 - LIS. `kl`: greedy by the KL divergence added, a byte freed. `contiguous`: as
`kl`, but a block that grows at its ends. `random`: by seed."""


@dataclass(frozen=True, slots=True)
class Search:
    """How an order is looked for."""

    order: str = "kl"
    lis: LisWeights = field(default_factory=LisWeights)
    lazy: bool = False
    """See `greedy_order`."""
    batch: int = 1
    """Candidates computed at once; the result does not depend on it."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Ladder:
    """Variants in the order in which a layer takes them."""

    weights: Mapping[str, Sequence[Weights]]
    """Variant -> by layer, what it stands for; without content for a fixed order."""
    freed: Mapping[str, Sequence[int]]
    """Variant -> by layer, bytes that it frees after the variant before."""


class StageRanking(msgspec.Struct, frozen=True):
    """The order of one variant."""

    variant: str
    picks: list[Pick]
    lts: list[float]
    """By layer, 1 - similarity; of `lis` only."""
    lrs: list[float]
    """Likewise."""

    @property
    def layers(self) -> list[int]:
        return [pick.layer for pick in self.picks]


class Ranking(msgspec.Struct, frozen=True):
    """The orders of all variants, and what it cost to find them."""

    stages: list[StageRanking]
    candidates: int
    """Measured, of all rounds."""
    full_forwards: float
    """Decoder layers computed over the whole calibration text, divided by their number."""
    full_forwards_plain: float
    """One full forward for each candidate of each round: L (L + 1) / 2 a variant."""
    seconds: float

    @property
    def forwards_saved_ratio(self) -> float:
        return 1 - self.full_forwards / self.full_forwards_plain

    def orders(self) -> dict[str, list[int]]:
        return {stage.variant: stage.layers for stage in self.stages}


Progress = Callable[[float], None]
"""Told how much of the work is done, 0 to 1."""


def rank(
    model: LayeredModel,
    token_ids: torch.Tensor,
    ladder: Ladder,
    search: Search,
    evaluations: Evaluations,
    progress: Progress = lambda done: None,
) -> Ranking:
    """Every variant's order of layers, on `token_ids` `[B, T]`.

    The first variant is ranked from full precision; each later one from all layers at the one
    before it. Leaves the model as loaded. Raises ValueError for an unknown order, or a layer
    whose numbers are not finite.
    """
    check_order(search.order)
    count = model.num_layers
    if search.order in FIXED_ORDERS:
        layers = fixed_order(search.order, count, search.seed)
        picks = [Pick(layer, 0.0, 0) for layer in layers]
        stages = [StageRanking(variant, picks, [], []) for variant in ladder.weights]
        return Ranking(stages, 0, 0.0, _plain(count, len(stages)), 0.0)
    ranker = _Ranker(Trajectory(model, token_ids), ladder, search, evaluations, progress)
    try:
        stages = [ranker.stage(variant) for variant in ladder.weights]
    finally:
        ranker.trajectory.reset()
    calls = evaluations.layer_calls(ranker.trajectory.layer_calls)
    candidates = sum(pick.measured for stage in stages for pick in stage.picks)
    plain = _plain(count, len(stages))
    return Ranking(stages, candidates, calls / count, plain, evaluations.seconds)


def check_order(order: str) -> None:
    """Raises ValueError for an unknown one."""
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; use one of {', '.join(ORDERS)}")


def _plain(count: int, stages: int) -> float:
    return stages * count * (count + 1) / 2


class _Ranker:
    """Goes through the stages; each begins where the one before it ends."""

    def __init__(
        self,
        trajectory: Trajectory,
        ladder: Ladder,
        search: Search,
        evaluations: Evaluations,
        progress: Progress,
    ) -> None:
        self.trajectory = trajectory
        self._ladder = ladder
        self._search = search
        self._evaluations = evaluations
        self._progress = progress
        self._done = 0
        self._total = _plain(trajectory.model.num_layers, len(ladder.weights))
        self._divergence = (
            None if search.order == "lis" else Divergence(trajectory.model, trajectory.output)
        )

    def stage(self, variant: str) -> StageRanking:
        stage = Stage(variant, self._ladder.weights[variant], self.trajectory, self._evaluations)
        search, layers = self._search, range(stage.num_layers)
        left = list(reversed(layers))

        def picked(_: Pick) -> None:
            self._done += left.pop(0) + 1
            self._progress(self._done / self._total)

        picks = greedy_order(
            layers,
            self._scorer(stage),
            lazy=search.lazy,
            batch=search.batch,
            candidates=neighbours if search.order == "contiguous" else anyone,
            on_pick=picked,
        )
        stage.move_to([pick.layer for pick in picks])
        return StageRanking(variant, picks, self._values(stage, "lts"), self._values(stage, "lrs"))

    def _scorer(self, stage: Stage) -> LisScorer | KlScorer:
        if self._divergence is None:
            return LisScorer(stage, self._search.lis)
        return KlScorer(stage, self._divergence, self._ladder.freed[stage.variant])

    def _values(self, stage: Stage, kind: str) -> list[float]:
        found = (
            self._evaluations.get(stage.variant, kind, (), layer)
            for layer in range(stage.num_layers)
        )
        return [value for value in found if value is not None]
