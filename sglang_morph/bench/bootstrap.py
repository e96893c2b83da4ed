"""Medians over runs with bootstrap intervals, and ratios of runs of the same block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over `runs` values, and its interval; None of a single value."""

    median: float
    low: float | None
    high: float | None
    runs: int


def estimate(values: Sequence[float], seed: int = 0) -> Estimate | None:
    """Percentile bootstrap over whole runs, which are what is independent; requests are not.

    With few runs the interval can't be wider than the runs' range. None of no values.
    """
    if not values:
        return None
    median = float(np.median(values))
    if len(values) == 1:
        return Estimate(median, None, None, 1)
    rng = np.random.default_rng(seed)
    draws = rng.choice(np.asarray(values), size=(RESAMPLES, len(values)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.median(draws, axis=1), [tail, 100 - tail])
    return Estimate(median, float(low), float(high), len(values))


BlockValues = Mapping[int, Sequence[float]]
"""Values of an arm's runs, by block."""


def paired_ratio(arm: BlockValues, reference: BlockValues, seed: int = 0) -> Estimate | None:
    """Median over `arm`'s runs of their value over the reference's mean in the same block.

    Blocks without the reference, or where its value is 0, don't count.
    """
    ratios = []
    for block, values in arm.items():
        base = float(np.mean(reference[block])) if reference.get(block) else 0.0
        if base:
            ratios += [value / base for value in values]
    return estimate(ratios, seed)
