"""The two-mode policy, and the decision process behind its thresholds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_morph.controller.mdp import TwoModeProcess, solve
from sglang_morph.controller.policy import Decision
from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.controller.signals import Signals
from sglang_morph.controller.two_mode import BUILT_IN, TwoModePolicy, load_solution
from sglang_morph.policy_cli.profile import load_profile
from sglang_morph.policy_cli.solve import Assumptions, solve_profile

MakeSignals = Callable[..., Signals]
TOP = 3


def drive(
    policy: TwoModePolicy, reading: Callable[[float, int], Signals], seconds: float, level: int = 0
) -> list[tuple[float, Decision]]:
    """Tick every 50 ms, carrying every decision out at once."""
    made = []
    for index in range(round(seconds * 20)):
        now = index / 20
        decision = policy.observe(reading(now, level))
        if decision is not None:
            made.append((now, decision))
            level = decision.target
            policy.moved(now, level)
    return made


def test_goes_all_the_way_down_when_waiting_prompts_exceed_the_base(signals: MakeSignals) -> None:
    policy = TwoModePolicy(PolicyOptions(), TOP)
    made = drive(
        policy,
        lambda now, level: replace(
            signals(now, used=800, level=level, waiting=3), waiting_tokens=300
        ),
        seconds=60,
    )
    assert [decision.target for _, decision in made] == [TOP]
    assert made[0][1].reason == "demand 1.10 >= 1.04 for 0.20 s"


def test_returns_when_demand_is_low_and_nobody_is_held_up(signals: MakeSignals) -> None:
    policy = TwoModePolicy(PolicyOptions(), TOP)
    made = drive(policy, lambda now, level: signals(now, used=700, level=level), 60, level=TOP)
    assert [decision.target for _, decision in made] == [0]
    waiting = drive(
        TwoModePolicy(PolicyOptions(), TOP),
        lambda now, level: signals(now, used=700, level=level, waiting=1, blocked=True),
        seconds=60,
        level=TOP,
    )
    assert waiting == []


@given(st.integers(0, 1000), st.integers(0, 3000), st.sampled_from([0, TOP]))
@settings(max_examples=30, deadline=None)
def test_constant_demand_causes_at_most_one_move(
    signals: MakeSignals, used: int, wanted: int, level: int
) -> None:
    made = drive(
        TwoModePolicy(PolicyOptions(), TOP),
        lambda now, level: replace(
            signals(now, used=used, level=level, waiting=int(wanted > 0)), waiting_tokens=wanted
        ),
        seconds=30,
        level=level,
    )
    assert len(made) <= 1


def test_options_override_the_solution_and_contradictions_are_refused() -> None:
    policy = TwoModePolicy(PolicyOptions(enter_pressure=1.5, leave_pressure=0.3), TOP)
    assert policy.describe()["enter_pressure"] == 1.5
    with pytest.raises(ValueError, match="below the second"):
        TwoModePolicy(PolicyOptions(leave_pressure=1.2), TOP)
    with pytest.raises(ValueError, match="give less than 1"):
        TwoModePolicy(PolicyOptions(enter_pressure=2.0, leave_pressure=1.0), TOP)
    with pytest.raises(ValueError, match="--morph-max-transitions-per-minute is 1"):
        TwoModePolicy(PolicyOptions(max_transitions_per_minute=1), TOP)


def test_reads_a_solution_and_refuses_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "solution.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(BUILT_IN, enter_demand=1.3)))
    policy = TwoModePolicy(PolicyOptions(two_mode_solution=str(path)), TOP)
    assert policy.parameters.enter_pressure == 1.3
    path.write_text('{"schema_version": 1}')
    with pytest.raises(ValueError, match="missing required field.*policy solve"):
        load_solution(str(path))
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(BUILT_IN, schema_version=9)))
    with pytest.raises(ValueError, match="schema version 9"):
        load_solution(str(path))
    with pytest.raises(ValueError, match="can't be read"):
        load_solution(str(tmp_path / "none.json"))


def test_the_built_in_thresholds_are_what_solving_finds() -> None:
    found = solve_profile(load_profile(BUILT_IN.profile), Assumptions())
    assert (found.enter_demand, found.leave_demand) == (
        BUILT_IN.enter_demand,
        BUILT_IN.leave_demand,
    )
    assert found.submodularity_violations == BUILT_IN.submodularity_violations == 0
    assert found.states == BUILT_IN.states


@pytest.mark.parametrize("load", [0.5, 0.9, 1.1])
def test_dearer_precision_makes_it_fall_later(load: float) -> None:
    profile = load_profile("h200-llama-8b")
    costs = (0.3, 0.5, 0.7)
    found = [solve_profile(profile, Assumptions(load=load, accuracy_cost=cost)) for cost in costs]
    assert [s.enter_demand for s in found] == sorted(s.enter_demand for s in found)
    assert all(s.leave_demand < s.enter_demand for s in found)


def test_precision_that_costs_nothing_to_lose_has_no_threshold() -> None:
    with pytest.raises(ValueError, match="raise --accuracy-cost"):
        solve_profile(load_profile("h200-llama-8b"), Assumptions(accuracy_cost=1e-6))


def brute_force(process: TwoModeProcess) -> np.ndarray:
    """Value of the best stationary policy, by evaluating every one of them exactly."""
    states = process.running.shape[1]
    best = np.full((2, states), np.inf)
    for choice in itertools.product((0, 1), repeat=2 * states):
        action = np.array(choice).reshape(2, states)
        matrix, cost = np.zeros((2 * states, 2 * states)), np.zeros(2 * states)
        for mode, x in itertools.product((0, 1), range(states)):
            to = action[mode, x]
            row = mode * states + x
            cost[row] = process.running[to, x] + (process.switching[mode] if to != mode else 0)
            matrix[row, to * states : (to + 1) * states] = process.moves[to, x]
        value = np.linalg.solve(np.eye(2 * states) - process.discount * matrix, cost)
        best = np.minimum(best, value.reshape(2, states))
    return best


weights = st.lists(st.floats(0.05, 1), min_size=18, max_size=18)


@given(
    weights,
    st.lists(st.floats(0, 10), min_size=6, max_size=6),
    st.tuples(st.floats(0, 3), st.floats(0, 3)),
    st.floats(0, 0.9),
)
@settings(max_examples=40, deadline=None)
def test_value_iteration_equals_brute_force(
    chances: list[float], costs: list[float], switching: tuple[float, float], discount: float
) -> None:
    moves = np.array(chances).reshape(2, 3, 3)
    moves /= moves.sum(axis=2, keepdims=True)
    process = TwoModeProcess(moves, np.array(costs).reshape(2, 3), switching, discount)
    np.testing.assert_allclose(solve(process).value, brute_force(process), atol=1e-6)


def test_a_process_is_checked() -> None:
    moves, running = np.full((2, 3, 3), 1 / 3), np.zeros((2, 3))
    with pytest.raises(ValueError, match="sum to 1"):
        TwoModeProcess(moves * 2, running, (0, 0), 0.5)
    with pytest.raises(ValueError, match="discount"):
        TwoModeProcess(moves, running, (0, 0), 1.0)
    with pytest.raises(ValueError, match="not be negative"):
        TwoModeProcess(moves, running, (-1, 0), 0.5)
    with pytest.raises(ValueError, match="shapes"):
        TwoModeProcess(moves, np.zeros((2, 4)), (0, 0), 0.5)
