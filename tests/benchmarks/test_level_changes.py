"""Gaps and steps around level changes, from arrivals made by hand."""

from __future__ import annotations

import pytest

from benchmarks.level_changes import deepest_level, downshift_gaps, restore_ratio
from benchmarks.served import Batch
from sglang_morph.bench.outcome import Outcome

STARTED = 1000.0
STEP_S = 0.01


def batch(steps_s: list[float], requests: int = 3, failed: bool = False) -> Batch:
    """All requests decode in step; one stream in three hiccups once at 0.9 s."""
    outcomes = []
    for index in range(requests):
        arrivals, now = [], 0.0
        for step_s in steps_s:
            now += step_s
            late = 0.004 if index == 0 and 0.895 < now < 0.905 else 0.0
            arrivals.append(now + late)
        done = Outcome(index, 0.0, 1, len(arrivals), output_tokens=len(arrivals))
        done.arrivals_s, done.arrival_tokens = arrivals, [1] * len(arrivals)
        outcomes.append(done)
    if failed:
        outcomes[0].error = "gone"
    return Batch(outcomes, STARTED, sum(steps_s))


def event(at_s: float, a: int, b: int, result: str, phase: str, took_s: float) -> dict:
    return {
        "time": STARTED + at_s, "from": a, "to": b, "result": result, "phase": phase,
        "duration_s": took_s,
    }  # fmt: skip


def test_the_gap_of_a_downshift_is_what_stops_all_requests() -> None:
    steps = [STEP_S] * 100 + [STEP_S + 0.003] + [STEP_S] * 100
    (found,) = downshift_gaps([batch(steps)], [event(1.004, 0, 1, "completed", "lower", 0.002)])
    assert found["step_ms"] == pytest.approx(10)
    assert found["gap_above_step_ms"] == pytest.approx(3)
    assert (found["from"], found["to"]) == (0, 1)
    # One stream that hiccups is no gap of the server.
    (found,) = downshift_gaps([batch(steps)], [event(0.9, 0, 1, "completed", "lower", 0.002)])
    assert found["gap_above_step_ms"] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("at_s", [0.1, 1.99, 5.0])
def test_a_downshift_outside_of_steady_decoding_does_not_count(at_s: float) -> None:
    down = event(at_s, 0, 1, "completed", "lower", 0.002)
    assert downshift_gaps([batch([STEP_S] * 200)], [down]) == []
    assert downshift_gaps([batch([STEP_S] * 200, failed=True)], [{**down, "time": 1001.0}]) == []


def test_steps_while_uploads_run_are_compared_with_those_before() -> None:
    # Withdrawn from 0.99 to 1.0 s, a long step; then six steps of 12 ms until the commit.
    steps = [STEP_S] * 99 + [0.02] + [0.012] * 6 + [0.03] + [STEP_S] * 90
    events = [
        event(1.002, 2, 1, "started", "reclaim", 0.012),
        event(1.085, 2, 1, "completed", "restore", 0.1),
    ]
    found = restore_ratio([batch(steps)], events)
    assert found["tpot_ratio"] == pytest.approx(1.2)
    assert found["restores"][0]["gaps"] == found["gaps"] == 18
    # A restore by two levels changes the weights on its way.
    jump = [{**e, "to": 0} for e in events]
    assert restore_ratio([batch(steps)], jump)["tpot_ratio"] is None


def test_the_deepest_level_of_eight_bits() -> None:
    levels = [
        {"variants": ["full", "full"]},
        {"variants": ["nested_fp8", "full"]},
        {"variants": ["nested_fp8", "fp8"]},
        {"variants": ["int4", "fp8"]},
    ]
    assert deepest_level(levels) == 2
    assert deepest_level(levels[:1]) == 0
