"""Rates and percentiles against brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_morph.controller.queue_tokens import waiting_tokens
from sglang_morph.controller.rates import LatencyWindow, RateWindow


def test_a_steady_rate() -> None:
    rate = RateWindow(window_s=3.0)
    for tick in range(1000):
        rate.add(tick * 0.01, tick * 7)
    assert rate.per_s == pytest.approx(700, rel=0.01)


def test_a_rate_forgets() -> None:
    rate = RateWindow(window_s=3.0)
    for tick in range(200):
        rate.add(tick * 0.1, min(tick, 100) * 50)
    assert rate.per_s == 0.0


def test_a_rate_after_a_gap_is_not_endless() -> None:
    rate = RateWindow(window_s=3.0)
    rate.add(0.0, 0)
    assert rate.per_s == 0.0
    rate.add(0.001, 3000)
    assert rate.per_s == pytest.approx(2000)


def test_a_counter_that_restarts_and_a_clock_that_steps_back_give_no_rate() -> None:
    rate = RateWindow()
    rate.add(10.0, 500)
    rate.add(11.0, 3)
    assert rate.per_s == 0.0
    rate.add(5.0, 900)
    assert rate.per_s == 0.0


seconds = st.floats(0.002, 500)


@given(st.lists(seconds, min_size=1, max_size=200), st.floats(1, 100))
def test_percentiles_are_right_within_five_percent(values: list[float], percent: float) -> None:
    window = LatencyWindow()
    window.advance(0.0)
    for value in values:
        window.add(value)
    exact = sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]
    assert window.percentile(percent) == pytest.approx(exact, rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 12), seconds), min_size=1, max_size=80))
def test_the_window_keeps_exactly_its_slices(steps: list[tuple[float, float]]) -> None:
    window = LatencyWindow(window_s=30.0, slices=6)
    now, added = 0.0, []
    for gap, value in steps:
        now += gap
        window.advance(now)
        window.add(value)
        added.append((now // 5.0, value))
    kept = [value for slot, value in added if slot > now // 5.0 - 6]
    assert window.count == len(kept)
    assert window.percentile(100) == pytest.approx(max(kept), rel=0.05)
    window.advance(now + 31.0)
    assert (window.count, window.percentile(95)) == (0, 0.0)


@pytest.mark.parametrize(("value", "shown"), [(0.0, 1e-3), (1e9, 1000.0)])
def test_durations_out_of_range_count_at_the_ends(value: float, shown: float) -> None:
    window = LatencyWindow()
    window.advance(0.0)
    window.add(value)
    assert window.percentile(50) == pytest.approx(shown, rel=0.12)


def test_a_long_queue_is_estimated_from_its_head() -> None:
    assert waiting_tokens([], len) == 0
    assert waiting_tokens([range(n) for n in (3, 4, 5)], len) == 12
    assert waiting_tokens([range(10)] * 10_000, len) == 100_000
