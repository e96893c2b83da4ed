from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_morph.controller.limits import LimitGuard, Limits
from sglang_morph.controller.policy import Decision

TOP = 4


def guard(**limits: int | bool) -> LimitGuard:
    made = LimitGuard(TOP)
    made.limits = Limits(**limits)  # type: ignore[arg-type]
    made.limits.check(TOP)
    return made


def test_without_limits_a_decision_passes_unchanged() -> None:
    decision = Decision(3, "pressure")
    assert guard().bound(decision, 1, 0.0) == (decision, None)
    assert guard().bound(None, 1, 0.0) == (None, None)


def test_a_decision_beyond_the_limits_goes_as_far_as_they_allow() -> None:
    decision, obstacle = guard(highest_level=2).bound(Decision(4, "pressure"), 0, 0.0)
    assert decision == Decision(2, "pressure; limits allow levels 0 to 2")
    assert obstacle is None
    decision, obstacle = guard(highest_level=2).bound(Decision(4, "pressure"), 2, 0.0)
    assert (decision, obstacle) == (None, "limits allow levels 0 to 2")


@pytest.mark.parametrize(
    ("limits", "level", "target"), [({"highest_level": 1}, 3, 1), ({"lowest_level": 2}, 0, 2)]
)
def test_narrower_limits_move_the_level_by_themselves(
    limits: dict[str, int], level: int, target: int
) -> None:
    decision, _ = guard(**limits).bound(None, level, 0.0)
    assert decision is not None and decision.target == target
    assert "limits allow" in decision.reason


def test_hold_stops_everything_and_says_so() -> None:
    held = guard(hold=True, highest_level=1)
    for decision in (Decision(2, "up"), Decision(0, "down"), None):
        allowed, obstacle = held.bound(decision, 3, 0.0)
        assert allowed is None
        assert obstacle is not None and "holds the level" in obstacle


@given(
    cap=st.integers(2, 6),
    targets=st.lists(st.tuples(st.integers(0, TOP), st.floats(0, 20)), max_size=60),
)
def test_the_cap_holds_and_the_last_move_is_a_restore(
    cap: int, targets: list[tuple[int, float]]
) -> None:
    capped, level, now = guard(max_transitions_per_minute=cap), 0, 100.0
    moves: list[tuple[float, bool]] = []
    for target, passed in targets:
        now += passed
        decision, _ = capped.bound(Decision(target, ""), level, now)
        if decision is None:
            continue
        moves.append((now, decision.target > level))
        level = decision.target
        capped.moved(now)
        recent = [is_up for at, is_up in moves if now - at < 60]
        assert len(recent) <= cap
        assert len(recent) < cap or not recent[-1]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(highest_level=5), "highest_level 5 is not available: give 0 to 4"),
        (Limits(lowest_level=5), "lowest_level 5"),
        (Limits(lowest_level=3, highest_level=2), "lowest_level 3 is above highest_level 2"),
        (Limits(max_transitions_per_minute=1), "max_transitions_per_minute is 1"),
        (Limits(max_transitions_per_minute=601), "max_transitions_per_minute is 601"),
        (Limits(restore_gb_per_s=0.0), "restore_gb_per_s is 0.0: give more than 0"),
        (Limits(restore_gb_per_s=float("nan")), "restore_gb_per_s is nan"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: Limits, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        limits.check(TOP)
