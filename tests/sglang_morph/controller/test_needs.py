"""Needs: a multiset whose maximum bounds every decision from below."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_morph.controller.needs import Needs
from sglang_morph.controller.policy import Decision

PAGES = (10, 20, 20, 40)
TOP = len(PAGES) - 1
levels = st.integers(0, TOP)


def with_needs(running: list[int], expected: int = 0) -> Needs:
    needs = Needs(PAGES)
    for need in running:
        needs.admit(need)
    needs.expect(expected)
    return needs


@pytest.mark.parametrize(
    ("pages", "level"), [(0, 0), (10, 0), (11, 1), (20, 1), (21, 3), (40, 3), (99, 3)]
)
def test_a_need_is_the_lowest_level_with_the_pages(pages: int, level: int) -> None:
    assert Needs(PAGES).level_for(pages) == level


@given(st.lists(st.tuples(st.booleans(), levels), max_size=60))
def test_the_highest_need_in_force_counts(steps: list[tuple[bool, int]]) -> None:
    needs, running = Needs(PAGES), list[int]()
    for admitted, need in steps:
        if admitted:
            needs.admit(need)
            running.append(need)
        elif need in running:
            needs.release(need)
            running.remove(need)
        assert needs.running == max(running, default=0)
        assert needs.running_requests == sum(need > 0 for need in running)


def test_a_need_that_is_not_in_force_cannot_be_released() -> None:
    with pytest.raises(ValueError, match="need 2"):
        with_needs([1]).release(2)


@given(st.lists(levels, max_size=4), levels, levels, levels | st.none(), levels)
def test_decisions_stay_above_what_is_needed_and_may_be_had(
    running: list[int], expected: int, level: int, target: int | None, highest: int
) -> None:
    needs = with_needs(running, expected)
    decision = None if target is None else Decision(target, "quiet")
    bounded, obstacle = needs.bound(decision, level, highest)
    after = level if bounded is None else bounded.target
    lowest = max([*running, expected if expected <= highest else 0])
    assert after == max(level if target is None else target, lowest)
    if decision is not None and decision.target >= lowest:
        assert bounded is decision
    assert (obstacle is not None) == (
        bounded is None and level == lowest > (target or 0) and (decision is not None)
    )


@given(st.lists(levels, max_size=4), levels, levels)
def test_nobody_takes_the_pages_of_a_running_request(
    running: list[int], level: int, target: int
) -> None:
    needs = with_needs(running, expected=TOP)
    lowest = max(running, default=0)
    assert needs.permit(Decision(target, "limits"), level) == (target >= min(level, lowest))
    assert needs.permit(None, level)
