"""Dwell, cap and persistence, apart from any policy."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_morph.controller.guards import MINUTE_S, Hysteresis, MoveLimit


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
