"""The two-mode policy of DPS: full precision or the last level, by thresholds solved offline."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from sglang_morph.controller.guards import Hysteresis
from sglang_morph.controller.policy import Decision, Policy
from sglang_morph.controller.policy_options import PolicyOptions, check_cap, check_seconds
from sglang_morph.controller.signals import Signals

SCHEMA_VERSION = 1


class Solution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds of a solved decision process, and what it was solved from."""

    schema_version: int
    enter_demand: float
    """Pages used and waited for, over base pages, from which the low mode costs less."""
    leave_demand: float
    """The same, up to which full precision costs less again."""
    submodularity_violations: int
    """Steps of the grid over which the low mode's gain falls as demand rises: 0 in theory."""
    states: int
    """Of the grid, as far as it was checked."""
    profile: str
    assumptions: dict[str, float]


BUILT_IN = Solution(
    schema_version=SCHEMA_VERSION,
    enter_demand=1.04,
    leave_demand=0.76,
    submodularity_violations=0,
    states=200,
    profile="h200-llama-8b",
    assumptions={"load": 0.9, "accuracy_cost": 0.5},
)
"""What `sglang-morph policy solve` finds with its defaults."""


@dataclass(frozen=True, slots=True)
class TwoModeParameters:
    """`enter_pressure` and `leave_pressure` are thresholds of `Signals.demand`."""

    enter_pressure: float
    leave_pressure: float
    enter_hold_s: float = 0.2
    leave_hold_s: float = 4.0
    min_dwell_s: float = 1.0
    max_transitions_per_minute: int = 12

    def check(self) -> None:
        """Raises ValueError for values that are out of range or contradict each other."""
        enter, leave = self.enter_pressure, self.leave_pressure
        if not 0 <= leave < enter:
            raise ValueError(
                f"--morph-leave-pressure is {leave}, --morph-enter-pressure {enter}: for two_mode "
                "the first must be 0 or more and below the second"
            )
        if leave >= 1:
            raise ValueError(
                f"--morph-leave-pressure is {leave}: give less than 1, else what is in use would "
                "not fit the base pages"
            )
        check_seconds(self, "enter_hold_s", "leave_hold_s", "min_dwell_s")
        check_cap(self.max_transitions_per_minute)


class TwoModePolicy(Policy):
    """Level 0 or the highest, nothing between.

    Thresholds come from a discounted Markov decision process over (demand, mode), whose costs are
    the requests held up, the precision lost and the switch itself; see `controller.mdp`. Where
    its value function is submodular, the best policy is to lower precision above one demand and
    restore it below a lower one, so two numbers are all that has to run in the server. Demand
    counts waiting prompts too: pages in use alone stop at the capacity and would not tell a long
    queue from a short one.

    Precision returns only if nobody waits for room. Under constant demand there is at most one
    move: to go down and come back, one demand would have to be above `enter` and below `leave`.
    """

    name: ClassVar[str] = "two_mode"

    def __init__(self, options: PolicyOptions, top_level: int) -> None:
        """`top_level` is the plan's last level. Raises ValueError for bad options or files."""
        path = options.two_mode_solution
        self._solution = BUILT_IN if path is None else load_solution(path)
        self.parameters = options.override(
            TwoModeParameters(self._solution.enter_demand, self._solution.leave_demand)
        )
        self.parameters.check()
        self.max_level = options.ceiling(top_level)
        self._guard = Hysteresis(
            self.parameters.enter_hold_s,
            self.parameters.leave_hold_s,
            self.parameters.min_dwell_s,
            self.parameters.max_transitions_per_minute,
        )

    def observe(self, signals: Signals) -> Decision | None:
        demand, parameters = signals.demand, self.parameters
        self._guard.observe(
            signals.now,
            demand >= parameters.enter_pressure,
            signals.fits_base(parameters.leave_pressure),
        )
        if self._guard.may_lower and signals.level < self.max_level:
            cause = f"demand {demand:.2f} >= {parameters.enter_pressure:.2f}"
            return Decision(self.max_level, f"{cause} for {self._guard.enter.seconds:.2f} s")
        if self._guard.may_restore and signals.level > 0:
            cause = f"demand {demand:.2f} <= {parameters.leave_pressure:.2f}"
            return Decision(0, f"{cause} for {self._guard.leave.seconds:.2f} s")
        return None

    def may_lower(self, now: float) -> bool:
        return self._guard.limit.may_lower(now)

    def moved(self, now: float, level: int) -> None:
        self._guard.moved(now)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "max_level": self.max_level,
            **asdict(self.parameters),
            "solution": msgspec.to_builtins(self._solution),
        }


def load_solution(path: str) -> Solution:
    """Raises ValueError, with the remedy, for a file that can't be used."""
    remedy = "write one with `sglang-morph policy solve --out FILE`"
    try:
        solution = msgspec.json.decode(Path(path).read_bytes(), type=Solution)
    except OSError as error:
        raise ValueError(
            f"--morph-two-mode-solution {path} can't be read ({error.strerror}); {remedy}"
        ) from error
    except msgspec.DecodeError as error:
        raise ValueError(f"--morph-two-mode-solution {path}: {error}; {remedy}") from error
    if solution.schema_version != SCHEMA_VERSION:
        raise ValueError(
            f"--morph-two-mode-solution {path} has schema version {solution.schema_version}, not "
            f"{SCHEMA_VERSION}; {remedy}"
        )
    return solution
