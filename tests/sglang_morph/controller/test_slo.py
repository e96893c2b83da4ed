"""The policy that aims at latency targets: bounds, monotony, no limit cycle, and its budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.controller.signals import Signals
from sglang_morph.controller.slo import (
    ENTER_LAX,
    ENTER_STRICT,
    LEAVE_LAX,
    LEAVE_STRICT,
    QualityBudget,
    SloPolicy,
    Urgency,
)

MakeSignals = Callable[..., Signals]
TOP = 4
TICK = 0.1


def drive(
    policy: SloPolicy, reading: Callable[[float, int], Signals], seconds: float, level: int = 0
) -> list[tuple[float, int]]:
    """(time, target) of every decision; each is carried out at once."""
    made = []
    for index in range(round(seconds / TICK)):
        now = index * TICK
        decision = policy.observe(reading(now, level))
        if decision is not None:
            level = decision.target
            made.append((now, level))
            policy.moved(now, level)
    return made


steps = st.lists(st.tuples(st.floats(0, 3), st.floats(0, 5), st.floats(0, 5)), max_size=150)


@given(steps)
def test_urgency_is_bounded_and_monotone_in_load(ticks: list[tuple[float, float, float]]) -> None:
    low, high, now = Urgency(), Urgency(), 0.0
    for gap, one, other in ticks:
        now += gap
        low.observe(now, min(one, other))
        high.observe(now, max(one, other))
        assert 0 <= low.value <= high.value <= 1
        assert high.between(ENTER_LAX, ENTER_STRICT) <= low.between(ENTER_LAX, ENTER_STRICT)
        assert high.between(LEAVE_LAX, LEAVE_STRICT) <= low.between(LEAVE_LAX, LEAVE_STRICT)


def test_the_bands_of_the_thresholds_do_not_overlap() -> None:
    assert LEAVE_STRICT < LEAVE_LAX < ENTER_STRICT < ENTER_LAX


@given(
    used=st.integers(0, 3000),
    ttft=st.floats(0, 20),
    tpot=st.floats(0, 2),
    blocked=st.booleans(),
    level=st.integers(0, TOP),
)
@settings(max_examples=60, deadline=None)
def test_constant_load_changes_direction_at_most_once(
    signals: MakeSignals, used: int, ttft: float, tpot: float, blocked: bool, level: int
) -> None:
    """A level that lends little shows the same demand as a full pool and a queue."""

    def reading(now: float, level: int) -> Signals:
        full = signals(now, level=level)
        held = min(used, full.capacity_pages)
        waits = blocked or held < used
        return replace(
            signals(
                now,
                used=held,
                level=level,
                waiting=int(waits),
                oldest_wait_s=5.0 * waits,
                blocked=waits,
            ),
            ttft_s=ttft,
            tpot_s=tpot,
        )

    policy = SloPolicy(PolicyOptions(quality_budget=1.0), TOP)
    levels = [level, *(target for _, target in drive(policy, reading, 200.0, level))]
    directions = [b > a for a, b in pairwise(levels)]
    assert sum(a != b for a, b in pairwise(directions)) <= 1
    late = drive(policy, lambda now, level: reading(200.0 + now, level), 300.0, levels[-1])
    assert late == []


def test_violations_make_it_enter_earlier_and_leave_later(signals: MakeSignals) -> None:
    calm, pressed = SloPolicy(PolicyOptions(), TOP), SloPolicy(PolicyOptions(), TOP)
    for policy, ttft in ((calm, 0.1), (pressed, 4.0)):
        drive(policy, lambda now, level, ttft=ttft: replace(signals(now), ttft_s=ttft), 10.0)
    assert (calm.enter_pressure, calm.leave_pressure) == (ENTER_LAX, LEAVE_LAX)
    assert pressed.enter_pressure == pytest.approx(ENTER_STRICT)
    assert pressed.leave_pressure == pytest.approx(LEAVE_STRICT)
    assert pressed.enter_queue_delay_s < calm.enter_queue_delay_s
    made = drive(pressed, lambda now, level: signals(100 + now, used=750, level=level), 5.0)
    assert [level for _, level in made] == [1]
    assert drive(calm, lambda now, level: signals(100 + now, used=750), 5.0) == []


def test_time_per_output_token_counts_too(signals: MakeSignals) -> None:
    policy = SloPolicy(PolicyOptions(tpot_target_s=0.05), TOP)
    drive(policy, lambda now, level: replace(signals(now), tpot_s=0.2), 10.0)
    assert policy.urgency.value == 1.0


def test_without_violations_urgency_is_gone_in_two_minutes(signals: MakeSignals) -> None:
    policy = SloPolicy(PolicyOptions(), TOP)
    drive(policy, lambda now, level: replace(signals(now), ttft_s=9.0), 10.0)
    drive(policy, lambda now, level: signals(10 + now), 121.0)
    assert policy.urgency.value == 0.0


def test_latency_alone_lowers_nothing_at_low_pressure(signals: MakeSignals) -> None:
    policy = SloPolicy(PolicyOptions(), TOP)
    reading = lambda now, level: replace(signals(now, used=600), ttft_s=50.0)  # noqa: E731
    assert drive(policy, reading, 100.0) == []


def test_with_a_wait_given_lateness_lowers_within_the_budget(signals: MakeSignals) -> None:
    options = PolicyOptions(enter_late_s=0.5, quality_budget=0.0, quality_burst_s=5.0)
    policy = SloPolicy(options, TOP)
    late = lambda now, level: signals(now, 600, level, waiting=2, oldest_wait_s=1.0)  # noqa: E731
    made = drive(policy, late, 30.0)
    assert [level for _, level in made] == [1, 3, TOP, 0], "up while late, until all is spent"


class Plant:
    """A server under constant load. Demand above capacity queues; below full precision it is
    served faster, so that demand shrinks to `ease` of what it was."""

    def __init__(self, demand: int, ease: float, signals: MakeSignals) -> None:
        self.demand, self.ease, self.signals = demand, ease, signals
        self.now_demand = float(demand)

    def reading(self, now: float, level: int) -> Signals:
        wanted = self.demand * (self.ease if level else 1.0)
        self.now_demand += (wanted - self.now_demand) * TICK / 2.0
        full = self.signals(now, level=level)
        used = min(int(self.now_demand), full.capacity_pages)
        waits = self.now_demand > full.capacity_pages
        wait_s = 4.0 * waits
        made = self.signals(
            now, used=used, level=level, waiting=int(waits), oldest_wait_s=wait_s, blocked=waits
        )
        return replace(made, ttft_s=3.0 if waits else 0.2)


@given(st.integers(0, 2500), st.floats(0.75, 1.0))
@settings(max_examples=25, deadline=None)
def test_no_limit_cycle_where_demand_shrinks_by_up_to_a_quarter(
    signals: MakeSignals, demand: int, ease: float
) -> None:
    """0.75 * 0.95 is above every leave threshold, so who went down stays there."""
    plant = Plant(demand, ease, signals)
    policy = SloPolicy(PolicyOptions(quality_budget=1.0), TOP)
    made = drive(policy, plant.reading, 300.0)
    assert len(made) <= TOP
    assert all(now < 60 for now, _ in made)


def test_where_demand_shrinks_by_more_the_cap_still_holds(signals: MakeSignals) -> None:
    plant = Plant(1050, 0.3, signals)
    policy = SloPolicy(PolicyOptions(quality_budget=1.0), TOP)
    cap = policy.parameters.max_transitions_per_minute
    times = [now for now, _ in drive(policy, plant.reading, 600.0)]
    assert len(times) > cap
    assert all(later - now >= 60.0 - 1e-6 for now, later in zip(times, times[cap:], strict=False))


@given(
    st.lists(st.tuples(st.floats(0.01, 60), st.booleans()), min_size=1, max_size=100),
    st.floats(0, 1),
    st.floats(1, 300),
)
def test_the_budget_bounds_time_below_full_precision(
    spans: list[tuple[float, bool]], share: float, burst: float
) -> None:
    """If precision is full whenever the budget is spent, over every span that begins in credit."""
    budget, now, spent = QualityBudget(share, burst), 0.0, 0.0
    for gap, wants in spans:
        lowered = wants and not budget.is_spent
        if lowered:
            gap = min(gap, 0.1)
        budget.observe(now, lowered)
        now += gap
        spent += gap if lowered else 0.0
        budget.observe(now, False)
        assert spent <= share * now + burst + 0.1 + 1e-6


def test_a_spent_budget_restores_at_any_pressure_and_bars_emergencies(
    signals: MakeSignals,
) -> None:
    options = PolicyOptions(quality_budget=0.2, quality_burst_s=10.0)
    policy = SloPolicy(options, TOP)
    reading = lambda now, level: signals(now, used=1000 + 500 * level, level=level)  # noqa: E731
    made = drive(policy, reading, 120.0)
    downs = [now for now, level in made if level == 0]
    assert downs[0] == pytest.approx(10.0 / 0.8, abs=1.5)
    below = 0.0
    level, before = 0, 0.0
    for now, target in made:
        below += (now - before) * (level > 0)
        level, before = target, now
    assert below <= 0.2 * 120 + 10 + 1
    assert not policy.relieves or policy.budget.credit_s > 0


def test_without_a_limit_the_budget_is_never_spent(signals: MakeSignals) -> None:
    policy = SloPolicy(PolicyOptions(quality_budget=1.0, quality_burst_s=1.0), TOP)
    drive(policy, lambda now, level: signals(now, used=1000 + 500 * level, level=level), 100.0)
    assert policy.relieves


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ttft_target_s": 0.0}, "--morph-ttft-target-s is 0.0"),
        ({"tpot_target_s": float("inf")}, "--morph-tpot-target-s is inf"),
        ({"quality_budget": 1.5}, "--morph-quality-budget is 1.5"),
        ({"quality_budget": float("nan")}, "--morph-quality-budget is nan"),
        ({"quality_burst_s": -1.0}, "--morph-quality-burst-s is -1.0"),
        ({"max_transitions_per_minute": 0}, "--morph-max-transitions-per-minute is 0"),
        ({"max_level": -1}, "--morph-max-level is -1"),
    ],
)
def test_bad_options_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SloPolicy(PolicyOptions(**change), TOP)
