"""The monitor's windows against brute force, its counts, and its fixed memory."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_morph.controller.monitor import Monitor, TimeWindow, TransitionResult
from sglang_morph.controller.signals import Signals

MakeSignals = Callable[..., Signals]
Reading = tuple[float, float]
"""(moment, value in effect from then on)."""


def brute_mean(readings: Sequence[Reading], start: float) -> float:
    """Mean of the step function from `start` to the last reading."""
    area = seconds = 0.0
    for (begin, value), (end, _) in itertools.pairwise(readings):
        held = max(0.0, end - max(begin, start))
        area += value * held
        seconds += held
    return area / seconds if seconds else readings[-1][1]


def brute_maximum(readings: Sequence[Reading], start: float) -> float:
    """Highest value in effect at any moment from `start` on, also if it ends right there."""
    ends = [moment for moment, _ in readings[1:]] + [float("inf")]
    return max(value for (_, value), end in zip(readings, ends, strict=True) if end >= start)


def feed(window: TimeWindow, steps: Sequence[Reading], begin: float) -> list[Reading]:
    now, readings = begin, []
    for gap, value in steps:
        now += gap
        window.add(now, value)
        readings.append((now, value))
    return readings


# Multiples of 1/64 s, and a power of two as bucket width, keep the brute force free of rounding.
steps = st.lists(
    st.tuples(st.integers(0, 200).map(lambda n: n / 64), st.floats(0, 3)), min_size=1, max_size=120
)


@given(steps, st.integers(0, 10_000))
def test_window_equals_brute_force(steps: list[Reading], begin: int) -> None:
    window = TimeWindow(window_s=4.0, buckets=16)
    readings = feed(window, steps, float(begin))
    covered_from = (readings[-1][0] // 0.25 - 16) * 0.25
    assert window.mean == pytest.approx(brute_mean(readings, covered_from), abs=1e-9)
    assert window.maximum == brute_maximum(readings, covered_from)


@given(steps)
def test_window_is_within_a_bucket_of_the_exact_window(steps: list[Reading]) -> None:
    window = TimeWindow(window_s=4.0, buckets=16)
    readings = feed(window, steps, 0.0)
    exact_start = readings[-1][0] - 4.0
    # One bucket more is covered: a sixteenth of the window, with values from 0 to 3.
    assert window.mean == pytest.approx(brute_mean(readings, exact_start), abs=3 / 16 + 1e-9)
    assert window.maximum >= brute_maximum(readings, exact_start)


def test_window_without_readings_and_with_one() -> None:
    window = TimeWindow()
    assert (window.mean, window.maximum) == (0.0, 0.0)
    window.add(12.5, 0.7)
    assert (window.mean, window.maximum) == (0.7, 0.7)


def test_window_forgets_all_but_the_value_in_effect_over_a_long_gap() -> None:
    window = TimeWindow(window_s=5.0)
    window.add(0.0, 2.0)
    window.add(1.0, 0.5)
    window.add(1e6, 0.25)
    assert window.mean == pytest.approx(0.5)
    assert window.maximum == 0.5


def test_window_weights_by_time_and_not_by_readings() -> None:
    window = TimeWindow(window_s=5.0)
    for tick in range(100):
        window.add(tick / 100, 1.0)
    window.add(1.0, 0.0)
    window.add(4.0, 0.0)
    assert window.mean == pytest.approx(0.25)


@pytest.mark.parametrize(("window_s", "buckets"), [(0.0, 10), (-1.0, 10), (5.0, 0)])
def test_window_needs_time_and_buckets(window_s: float, buckets: int) -> None:
    with pytest.raises(ValueError, match="needs time and buckets"):
        TimeWindow(window_s, buckets)


def test_rounding_does_not_pile_up() -> None:
    window = TimeWindow(window_s=1.0, buckets=10)
    for tick in range(200_000):
        window.add(tick * 0.013, 1e9 if tick < 1000 else 0.1)
    assert window.mean == pytest.approx(0.1, rel=1e-9)


def test_summary_counts_what_happened(signals: MakeSignals) -> None:
    monitor = Monitor()
    for now, level, used in [(10.0, 0, 900), (11.0, 0, 950), (12.5, 1, 1200), (16.0, 0, 100)]:
        monitor.observe(signals(now, used=used, level=level))
    results: list[TransitionResult] = [
        "started",
        "completed",
        "deferred",
        "deferred",
        "rolled_back",
    ]
    for result in results:
        monitor.transition(result)
    monitor.emergency()
    summary = monitor.summary()
    assert summary["ticks"] == 4
    assert summary["seconds_at_level"] == {"0": 2.5, "1": 3.5}
    assert monitor.seconds_at_level(1) == 3.5
    assert monitor.seconds_at_level(7) == 0.0
    assert (summary["peak_capacity_pages"], summary["lowest_capacity_pages"]) == (1500, 1000)
    assert summary["transitions"] == {
        "completed": 1,
        "started": 1,
        "deferred": 2,
        "rolled_back": 1,
    }
    assert summary["retractions_avoided"] == 1
    assert summary["pressure_max"] == 1.2
    assert summary["pressure_mean"] == pytest.approx((0.95 * 1.5 + 1.2 * 3.5) / 5, abs=0.03)
    assert summary["latest"]["used_pages"] == 100
    assert summary["latest"]["pressure"] == 0.1
    assert json.loads(json.dumps(summary)) == summary


def test_summary_before_the_first_tick() -> None:
    summary = Monitor().summary()
    assert summary["latest"] is None
    assert summary["ticks"] == summary["peak_capacity_pages"] == 0


def test_evictable_pages_are_not_pressure(signals: MakeSignals) -> None:
    monitor = Monitor()
    monitor.observe(signals(0.0, used=100, evictable=900))
    assert monitor.pressure.mean == 0.1


def test_latencies_rates_and_retractions_are_in_the_summary(signals: MakeSignals) -> None:
    monitor = Monitor(percentile=50.0)
    for tick in range(11):
        monitor.observe(
            replace(
                signals(float(tick)),
                arrived_tokens_total=300 * tick,
                served_tokens_total=100 * tick,
                retractions_total=3,
            )
        )
        monitor.request_finished(ttft_s=0.5, tpot_s=None if tick else 0.02)
    summary = monitor.summary()
    assert summary["arrived_tokens_per_s"] == pytest.approx(300)
    assert summary["served_tokens_per_s"] == pytest.approx(100)
    assert summary["ttft_s"]["p95"] == pytest.approx(0.5, rel=0.05)
    assert (summary["ttft_s"]["count"], summary["tpot_s"]["count"]) == (11, 1)
    assert (summary["requests_finished"], summary["retractions"]) == (11, 3)
    assert monitor.ttft_s == pytest.approx(0.5, rel=0.05)
    assert monitor.tpot_s == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("percentile", [0.0, -1.0, 100.1, float("nan")])
def test_a_percentile_lies_between_0_and_100(percentile: float) -> None:
    with pytest.raises(ValueError, match="--morph-slo-percentile"):
        Monitor(percentile=percentile)


def elements(value: object) -> int:
    """Number of elements in all containers reachable from `value`."""
    if isinstance(value, dict):
        return len(value) + sum(map(elements, value.values()))
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        return elements(vars(value)) if hasattr(value, "__dict__") else 0
    items = list(value)
    return len(items) + sum(map(elements, items))


def test_memory_is_fixed(signals: MakeSignals) -> None:
    monitor = Monitor()
    # A peak, and a point of a rate, is an entry with two numbers in it; a rate's latest is apart.
    peaks, rates, levels = 3 * (50 + 1), 2 * 3 * (50 + 2), 4
    limit = elements(monitor) + peaks + rates + levels
    for tick in range(100_000):
        falling = 1000 - tick // 100  # The worst case for the maximum: ever smaller values.
        monitor.observe(signals(tick * 0.0007, used=falling, level=tick // 500 % 4))
        if tick % 1000 == 0:
            assert elements(monitor) <= limit
    assert elements(monitor) > limit - 3 * 3 * 3


def test_brain_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, sglang_morph.controller.monitor, sglang_morph.controller.registry\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'sglang')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
