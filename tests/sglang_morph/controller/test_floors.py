"""Floors: a multiset whose minimum binds every decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_morph.controller.floors import Floors
from sglang_morph.controller.policy import Decision

TOP = 4
levels = st.integers(0, TOP)


def with_floors(running: list[int], expected: int | None = None) -> Floors:
    floors = Floors(TOP)
    for floor in running:
        floors.admit(floor)
    floors.expect(expected)
    return floors


@given(st.lists(st.tuples(st.booleans(), levels), max_size=60), levels | st.none())
def test_the_ceiling_is_the_lowest_floor_in_force(
    steps: list[tuple[bool, int]], expected: int | None
) -> None:
    floors, running = Floors(TOP), list[int]()
    for admitted, floor in steps:
        if admitted:
            floors.admit(floor)
            running.append(floor)
        elif floor in running:
            floors.release(floor)
            running.remove(floor)
        assert floors.running == min(running, default=TOP)
        assert floors.running_requests == len(running)
    floors.expect(expected)
    assert floors.ceiling == min([*running, TOP if expected is None else expected], default=TOP)
    floors.expect(None)
    assert floors.ceiling == floors.running


def test_a_floor_that_is_not_in_force_cannot_be_released() -> None:
    with pytest.raises(ValueError, match="floor 2"):
        with_floors([1]).release(2)


@given(st.lists(levels, max_size=4), levels | st.none(), levels, levels | st.none())
def test_decisions_stay_within_the_ceiling_and_a_level_above_it_is_left(
    running: list[int], expected: int | None, level: int, target: int | None
) -> None:
    floors = with_floors(running, expected)
    decision = None if target is None else Decision(target, "pressure")
    bounded, obstacle = floors.bound(decision, level)
    after = level if bounded is None else bounded.target
    assert after <= floors.ceiling
    assert after == min(level if target is None else target, floors.ceiling)
    if decision is not None and decision.target <= floors.ceiling:
        assert bounded is decision
    if bounded is not None:
        assert bounded.target != level or bounded is decision
    assert (obstacle is not None) == (decision is not None and bounded is None)


@given(st.lists(levels, max_size=4), levels, levels)
def test_nobody_raises_the_level_over_a_running_request(
    running: list[int], level: int, target: int
) -> None:
    floors = with_floors(running, expected=0)
    assert floors.permit(Decision(target, "limits"), level) == (
        target <= level or target <= min(running, default=TOP)
    )
    assert floors.permit(None, level)
