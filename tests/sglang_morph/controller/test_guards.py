"""Dwell, cap and persistence, apart from any policy."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_morph.controller.guards import MINUTE_S, Hysteresis, MoveLimit, Prevailing


def test_the_last_move_of_a_minute_is_kept_for_a_restore() -> None:
    limit = MoveLimit(min_dwell_s=1.0, max_per_minute=3)
    for now in (0.0, 10.0):
        assert limit.may_lower(now)
        limit.moved(now)
    assert not limit.may_lower(20.0)
    assert limit.may_restore(20.0)
    limit.moved(20.0)
    assert not limit.may_restore(59.9)
    assert limit.may_restore(60.0)
    assert not limit.may_lower(60.0)
    assert limit.may_lower(70.0)


def test_nothing_moves_within_the_dwell() -> None:
    limit = MoveLimit(min_dwell_s=2.0, max_per_minute=9)
    limit.moved(5.0)
    assert not limit.may_lower(6.9)
    assert not limit.may_restore(6.9)
    assert limit.may_lower(7.0)


@given(
    st.lists(st.tuples(st.floats(0, 20), st.booleans(), st.booleans()), max_size=200),
    st.integers(2, 8),
    st.floats(0, 5),
)
def test_moves_keep_dwell_and_cap_and_a_restore_is_always_free(
    ticks: list[tuple[float, bool, bool]], cap: int, dwell: float
) -> None:
    guard = Hysteresis(0.0, 0.0, dwell, cap)
    now, moves, is_low = 0.0, [], False
    for gap, crowded, calm in ticks:
        now += gap
        guard.observe(now, crowded, calm)
        if is_low and calm and moves and now - moves[-1] >= dwell:
            assert guard.may_restore
        if (is_low and guard.may_restore) or (not is_low and guard.may_lower):
            moves.append(now)
            guard.moved(now)
            is_low = not is_low
    assert all(after - before >= dwell for before, after in pairwise(moves))
    for index in range(len(moves) - cap):
        assert moves[index + cap] - moves[index] >= MINUTE_S


@pytest.mark.parametrize("hold", [0.0, 0.5])
def test_both_conditions_start_anew_after_a_move(hold: float) -> None:
    guard = Hysteresis(hold, hold, 0.0, 100)
    for now in (0.0, 0.25, 0.5):
        guard.observe(now, True, True)
    assert guard.may_lower and guard.may_restore
    guard.moved(0.5)
    guard.observe(0.6, True, True)
    assert guard.may_lower == guard.may_restore == (hold == 0.0)


def test_what_prevails_needs_three_readings_that_agree() -> None:
    reason = Prevailing(1.0)
    assert not reason.observe(0.0, True)
    assert not reason.observe(100.0, True), "one long interval counts for half"
    assert reason.observe(200.0, True)


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=100), st.floats(0.01, 2))
def test_a_condition_prevails_only_if_it_held_longer_than_not(
    readings: list[tuple[float, bool]], required: float
) -> None:
    reason, now, balances = Prevailing(required), 0.0, [0.0]
    held = False
    for gap, condition in readings:
        now += gap
        said = reason.observe(now, condition)
        balances.append(balances[-1] + (gap if condition and held else -gap * (not condition)))
        held = condition
        if said:
            assert condition and balances[-1] - min(balances) >= required - 1e-6
        assert 0 <= reason.seconds <= required
    now += 2 * required
    reason.observe(now, False)
    assert reason.seconds == 0, "a break longer than what is counted leaves nothing of it"
