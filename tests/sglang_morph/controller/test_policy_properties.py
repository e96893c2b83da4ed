"""What every policy promises, over random signals and random executors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.controller.registry import create_policy
from sglang_morph.controller.signals import Signals

MakeSignals = Callable[..., Signals]
TOP = 4
ARMS = {
    "accuracy": PolicyOptions(mode="accuracy"),
    "default": PolicyOptions(),
    "performance": PolicyOptions(mode="performance"),
    "two_mode": PolicyOptions(policy="two_mode"),
    "slo": PolicyOptions(policy="slo", quality_budget=1.0),
    "late": PolicyOptions(enter_late_s=0.5),
    "slo, late": PolicyOptions(policy="slo", quality_budget=1.0, enter_late_s=0.5),
}
FOR_ROOM_ONLY = {name: options for name, options in ARMS.items() if options.enter_late_s is None}
arms = pytest.mark.parametrize("options", ARMS.values(), ids=ARMS.keys())
arms_for_room_only = pytest.mark.parametrize(
    "options", FOR_ROOM_ONLY.values(), ids=FOR_ROOM_ONLY.keys()
)

Tick = tuple[float, int, int, float, str]
ticks = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0.02, 0.02, 0.1, 0.5]), st.floats(0, 20)),
        st.one_of(st.sampled_from([0, 500, 1000]), st.integers(0, 1000)),  # per mille of capacity
        st.sampled_from([0, 0, 0, 50, 2000]),  # prompt tokens that wait
        st.floats(0, 10),  # TTFT, and the age of the oldest request
        st.sampled_from(["carry out", "carry out", "carry out", "ignore"]),
    ),
    max_size=200,
)


def reading(make: MakeSignals, now: float, level: int, tick: Tick, arrived: int) -> Signals:
    _, fill, waiting_tokens, latency, _ = tick
    waits = waiting_tokens > 0
    made = make(
        now,
        used=fill * (1000 + 500 * level) // 1000,
        level=level,
        waiting=int(waits),
        oldest_wait_s=latency * waits,
        blocked=waits,
    )
    return replace(
        made,
        waiting_tokens=waiting_tokens,
        ttft_s=latency,
        arrived_tokens_total=arrived,
        served_tokens_total=arrived // 2,
    )


@arms
@given(ticks=ticks)
@settings(max_examples=60, deadline=None)
def test_no_policy_leaves_its_range_moves_within_dwell_or_above_the_cap(
    signals: MakeSignals, options: PolicyOptions, ticks: list[Tick]
) -> None:
    policy = create_policy(options, TOP)
    described = policy.describe()
    dwell, cap = described["min_dwell_s"], described["max_transitions_per_minute"]
    now, level, arrived, moves = 0.0, 0, 0, []
    for tick in ticks:
        now += tick[0]
        arrived += tick[1]
        decision = policy.observe(reading(signals, now, level, tick, arrived))
        if decision is None:
            continue
        assert 0 <= decision.target <= policy.max_level <= TOP
        assert decision.target != level
        assert decision.reason
        if tick[4] == "carry out":
            level = decision.target
            moves.append(now)
            policy.moved(now, level)
    assert all(after - before >= dwell for before, after in pairwise(moves))
    assert all(last - first >= 60 for first, last in zip(moves, moves[cap:], strict=False))


@arms
@given(ticks=ticks)
@settings(max_examples=60, deadline=None)
def test_none_stays_down_once_pressure_is_gone(
    signals: MakeSignals, options: PolicyOptions, ticks: list[Tick]
) -> None:
    """For the leave time plus dwell, however the level came about."""
    policy = create_policy(options, TOP)
    now, level, arrived = 0.0, 0, 0
    for tick in ticks:
        now += tick[0]
        arrived += tick[1]
        decision = policy.observe(reading(signals, now, level, tick, arrived))
        if decision is not None:
            level = decision.target
            policy.moved(now, level)
    described = policy.describe()
    patience = described["leave_hold_s"] + described["min_dwell_s"] + 0.1
    for index in range(round(patience / 0.05) + 1):
        decision = policy.observe(
            replace(
                signals(now + index * 0.05, used=300, level=level), arrived_tokens_total=arrived
            )
        )
        if decision is not None:
            level = decision.target
            policy.moved(now + index * 0.05, level)
    assert level == 0


@arms_for_room_only
@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(0, 400), st.integers(0, 20_000), st.floats(0, 30)),
        max_size=200,
    )
)
@settings(max_examples=60, deadline=None)
def test_none_acts_at_low_load(
    signals: MakeSignals,
    options: PolicyOptions,
    ticks: list[tuple[float, int, int, float]],
) -> None:
    """Few pages in use, room for who arrives: bursts of tokens and slow answers do not count."""
    policy = create_policy(options, TOP)
    now, arrived = 0.0, 0
    for gap, used, tokens, latency in ticks:
        now += gap
        arrived += tokens
        quiet = signals(now, used=used, waiting=1, oldest_wait_s=latency)
        assert (
            policy.observe(
                replace(
                    quiet,
                    waiting_tokens=min(tokens, 500),
                    arrived_tokens_total=arrived,
                    ttft_s=latency,
                )
            )
            is None
        )


@arms
@given(used=st.integers(0, 4000), start=st.integers(0, TOP), waits=st.booleans())
@settings(max_examples=60, deadline=None)
def test_constant_demand_settles(
    signals: MakeSignals, options: PolicyOptions, used: int, start: int, waits: bool
) -> None:
    """Demand that does not depend on the level: after a minute nothing moves any more."""
    policy = create_policy(options, TOP)
    level, late = start, []
    for index in range(2400):
        now = index * 0.1
        capacity = 1000 + 500 * level
        held = min(used, capacity)
        queued = waits or used > capacity
        decision = policy.observe(
            replace(
                signals(
                    now,
                    used=held,
                    level=level,
                    waiting=int(queued),
                    oldest_wait_s=3.0 * queued,
                    blocked=queued,
                ),
                waiting_tokens=used - held,
                ttft_s=4.0 if queued else 0.1,
            )
        )
        if decision is not None:
            level = decision.target
            policy.moved(now, level)
            late += [now] if now > 60 else []
    assert late == []
