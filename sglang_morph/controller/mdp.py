"""A discounted Markov decision process with two modes, solved by value iteration.

States are (x, mode) with x on a grid; an action is the mode for the next period. Going to mode `a`
costs `switching[mode, a]` once and `running[a, x]` for the period, and x moves by `moves[a]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TwoModeProcess:
    """All costs in one unit; `states` is the number of grid points."""

    moves: Array
    """Probabilities `[mode, states, states]`, rows summing to 1."""
    running: Array
    """Cost of one period `[mode, states]`."""
    switching: tuple[float, float]
    """Cost of leaving mode 0, and of leaving mode 1."""
    discount: float
    """In [0, 1)."""

    def __post_init__(self) -> None:
        modes, states, _ = self.moves.shape
        if self.moves.shape != (2, states, states) or self.running.shape != (2, states):
            raise ValueError(f"shapes do not fit: {self.moves.shape} and {self.running.shape}")
        if modes != 2 or not np.allclose(self.moves.sum(axis=2), 1):
            raise ValueError("the rows of `moves` must sum to 1")
        if not 0 <= self.discount < 1:
            raise ValueError(f"the discount is {self.discount}: give 0 or more, below 1")
        if min(self.switching) < 0:
            raise ValueError(f"switching costs must not be negative: {self.switching}")


@dataclass(frozen=True)
class TwoModeResult:
    """The best policy. Thresholds are grid indices."""

    value: Array
    """Expected discounted cost `[mode, states]`."""
    gain: Array
    """By how much mode 1 is cheaper than mode 0 from here on, switching left out `[states]`."""
    lower: npt.NDArray[np.bool_]
    """Where mode 0 is left `[states]`."""
    restore: npt.NDArray[np.bool_]
    """Where mode 1 is left `[states]`."""

    def violations(self, states: int | None = None) -> int:
        """Neighbours among the first `states` between which `gain` falls; 0 if it is submodular."""
        gain = self.gain[:states]
        scale = max(1.0, float(np.abs(gain).max()))
        return int((np.diff(gain) < -1e-6 * scale).sum())

    @property
    def is_threshold(self) -> bool:
        """Whether precision is lowered from one state on, and restored up to a lower one."""
        rises = bool(np.all(np.diff(self.lower.astype(int)) >= 0))
        falls = bool(np.all(np.diff(self.restore.astype(int)) <= 0))
        return rises and falls

    @property
    def enter(self) -> int | None:
        """First state at which mode 0 is left; None if it never is."""
        return int(np.argmax(self.lower)) if self.lower.any() else None

    @property
    def leave(self) -> int | None:
        """Last state, counted from 0 without a gap, at which mode 1 is left."""
        if not self.restore[0]:
            return None
        return len(self.restore) - 1 if self.restore.all() else int(np.argmin(self.restore)) - 1


def solve(process: TwoModeProcess, tolerance: float = 1e-9) -> TwoModeResult:
    """Iterate to within `tolerance` of the fixed point, relative to the largest value.

    In each mode V is the least of staying and switching, so with Q(x, a) the cost of running in
    mode `a` from here on: leave mode 0 where Q(x, 0) - Q(x, 1) exceeds its switching cost, leave
    mode 1 where the opposite does. If that gain never falls with x (V is submodular in demand and
    mode), both regions are half-lines and the policy is two thresholds, apart by hysteresis.
    """
    value = np.zeros_like(process.running)
    while True:
        ahead = _ahead(process, value)
        new = np.stack([_best(process, ahead, 0), _best(process, ahead, 1)])
        change = float(np.abs(new - value).max())
        value = new
        # The distance to the fixed point is at most discount / (1 - discount) times the change.
        bound = change * process.discount / (1 - process.discount)
        if bound <= tolerance * max(1.0, float(np.abs(value).max())):
            break
    ahead = _ahead(process, value)
    gain = ahead[0] - ahead[1]
    to_low, to_full = process.switching
    return TwoModeResult(value, gain, gain > to_low, -gain > to_full)


def _ahead(process: TwoModeProcess, value: Array) -> Array:
    """Cost of running in each mode from here on `[mode, states]`."""
    later = np.einsum("mij,mj->mi", process.moves, value)
    return process.running + process.discount * later


def _best(process: TwoModeProcess, ahead: Array, mode: int) -> Array:
    switch = process.switching[mode]
    result: Array = np.minimum(ahead[mode], ahead[1 - mode] + switch)
    return result
