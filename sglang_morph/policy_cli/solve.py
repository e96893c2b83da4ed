"""Thresholds for the `two_mode` policy: a decision process built from measured service rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from sglang_morph.bench.traces import TraceRequest
from sglang_morph.controller.mdp import Array, TwoModeProcess, TwoModeResult, solve
from sglang_morph.controller.two_mode import SCHEMA_VERSION, Solution
from sglang_morph.policy_cli.profile import ServerProfile


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the profile does not say."""

    prompt_tokens: float = 1155.0
    """Mean per request; the defaults are those of the Azure 2023 conversation trace."""
    output_tokens: float = 211.0
    variation: float = 1.0
    """Standard deviation of a request's tokens over their mean."""
    load: float = 0.9
    """Arriving requests over those that level 0 completes with its pages full."""
    accuracy_cost: float = 0.5
    """Price of a second below full precision: in seconds of delay, for as many requests as run at
    level 0 with its pages full."""
    period_s: float = 1.0
    horizon_s: float = 120.0
    """Costs this far ahead count 1/e."""
    step: float = 0.02
    """Of the grid of demand."""
    largest_demand: float = 6.0
    checked_demand: float = 4.0
    """Up to which submodularity is checked: beyond, the end of the grid shows."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"{name} is {value}: give a number above 0")

    @classmethod
    def from_requests(cls, requests: Sequence[TraceRequest], load: float) -> Assumptions:
        """Means and variation of a trace."""
        totals = np.array([r.input_tokens + r.output_tokens for r in requests], dtype=float)
        return cls(
            prompt_tokens=float(np.mean([r.input_tokens for r in requests])),
            output_tokens=float(np.mean([r.output_tokens for r in requests])),
            variation=max(0.05, float(totals.std() / totals.mean())),
            load=load,
        )

    @property
    def footprint(self) -> float:
        """Pages of a request, on average over its life: its outputs come one by one."""
        return self.prompt_tokens + self.output_tokens / 2


def solve_profile(profile: ServerProfile, assumptions: Assumptions) -> Solution:
    """Thresholds for level 0 against the last level. Raises ValueError where none exist."""
    grid = demand_grid(assumptions)
    checked = int(np.searchsorted(grid, assumptions.checked_demand))
    result = solve(build_process(profile, assumptions))
    if result.enter is None:
        raise ValueError(
            "the low mode never pays at these costs: lower --accuracy-cost or raise --load"
        )
    if not result.is_threshold:
        raise ValueError("the best policy has no thresholds; use another profile or coarser --step")
    return Solution(
        schema_version=SCHEMA_VERSION,
        enter_demand=round(float(grid[result.enter]), 4),
        leave_demand=round(_leave_demand(grid, result), 4),
        submodularity_violations=result.violations(checked),
        states=checked,
        profile=profile.name,
        assumptions=asdict(assumptions),
    )


def _leave_demand(grid: Array, result: TwoModeResult) -> float:
    """Precision has to come back somewhere, and what is in use must then fit the base pages."""
    if result.leave is None:
        raise ValueError("full precision never pays again: raise --accuracy-cost")
    below_base = int(np.searchsorted(grid, 1.0)) - 1
    return float(grid[min(result.leave, below_base)])


def demand_grid(assumptions: Assumptions) -> Array:
    """Pages used and waited for, over base pages."""
    points = round(assumptions.largest_demand / assumptions.step) + 1
    return np.linspace(0.0, assumptions.largest_demand, points)


def build_process(profile: ServerProfile, assumptions: Assumptions) -> TwoModeProcess:
    """Demand as a random walk: requests arrive at random and complete as fast as the mode allows.

    The cost of a period is the requests in the system (by Little's law their latency), and in the
    low mode a constant for the precision lost. A switch stalls the requests that run.
    """
    grid = demand_grid(assumptions)
    requests = grid * profile.base_pages / assumptions.footprint
    modes = (0, profile.top_level)
    rooms = [_room(profile, assumptions, level) for level in modes]
    rates = [
        np.array([completed_per_s(profile, assumptions, level, min(n, room)) for n in requests])
        for level, room in zip(modes, rooms, strict=True)
    ]
    arrivals = assumptions.load * completed_per_s(profile, assumptions, 0, rooms[0])
    period = assumptions.period_s
    moves = [_walk(profile, assumptions, grid, arrivals, rate) for rate in rates]
    running = np.stack([requests, requests + assumptions.accuracy_cost * rooms[0]]) * period
    top = profile.levels[-1]
    return TwoModeProcess(
        moves=np.stack(moves),
        running=running,
        switching=(top.lower_s * rooms[0], top.restore_s * rooms[0]),
        discount=float(np.exp(-period / assumptions.horizon_s)),
    )


def _room(profile: ServerProfile, assumptions: Assumptions, level: int) -> float:
    """Requests that run at once at `level`."""
    return min(profile.capacity(level) / assumptions.footprint, float(profile.max_running))


def completed_per_s(
    profile: ServerProfile, assumptions: Assumptions, level: int, running: float
) -> float:
    """Requests completed a second with `running` in the batch: each costs its prefill and its
    share of the decode steps."""
    if running <= 0:
        return 0.0
    measured = profile.levels[level]
    step_s = measured.decode.at(running)
    step_s += measured.decode_context_s * running * assumptions.footprint
    chunks = assumptions.prompt_tokens / profile.chunk_tokens
    prefill_s = measured.prefill.at(assumptions.prompt_tokens)
    if chunks > 1:
        prefill_s = chunks * measured.prefill.at(profile.chunk_tokens)
    # Below one running request the step is not shared, the request is just not always there.
    return 1.0 / (prefill_s + assumptions.output_tokens * step_s / running)


def _walk(
    profile: ServerProfile,
    assumptions: Assumptions,
    grid: Array,
    arrivals: float,
    completions: Array,
) -> Array:
    """Probabilities `[states, states]` of demand after a period, by a normal approximation."""
    size = assumptions.footprint / profile.base_pages
    period, width = assumptions.period_s, assumptions.step
    mean = grid + (arrivals - completions) * size * period
    second_moment = size**2 * (1 + assumptions.variation**2)
    deviation = np.sqrt((arrivals + completions) * second_moment * period)
    edges = grid[:-1] + width / 2
    below = _normal_cdf((edges[None, :] - mean[:, None]) / deviation[:, None])
    ends = np.zeros((len(grid), 1)), np.ones((len(grid), 1))
    moves: Array = np.diff(np.concatenate([ends[0], below, ends[1]], axis=1), axis=1)
    return moves


def _normal_cdf(z: Array) -> Array:
    values: Array = 0.5 * (1.0 + np.vectorize(math.erf, otypes=[float])(z / math.sqrt(2.0)))
    return values
