"""The threshold policy: exact cases, and properties over random loads and random executors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_morph.controller.policy import Decision
from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.controller.signals import Signals
from sglang_morph.controller.threshold import ThresholdPolicy

OPTIONS = PolicyOptions(
    enter_pressure=0.85,
    leave_pressure=0.6,
    enter_queue_delay_s=0.1,
    enter_hold_s=0.2,
    leave_hold_s=2.0,
    min_dwell_s=1.0,
)
TOP = 7
TICK = 1 / 64

MakeSignals = Callable[..., Signals]
Tick = tuple[float, int, bool, str, int | None]


def drive(
    policy: ThresholdPolicy,
    reading: Callable[[float, int], Signals],
    seconds: float,
    level: int = 0,
    begin: float = 0.0,
    tick: float = TICK,
) -> list[tuple[float, Decision]]:
    """Tick for `seconds`, carrying every decision out at once; the decisions and their times."""
    made = []
    for index in range(round(seconds / tick)):
        now = begin + index * tick
        decision = policy.observe(reading(now, level))
        if decision is not None:
            made.append((now, decision))
            level = decision.target
            policy.moved(now, level)
    return made


def targets(made: Iterable[tuple[float, Decision]]) -> list[int]:
    return [decision.target for _, decision in made]


def test_goes_up_after_the_hold_and_says_why(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    assert policy.observe(signals(0.0, used=910)) is None
    assert policy.observe(signals(0.1, used=910)) is None
    assert policy.observe(signals(0.19, used=910)) is None
    decision = policy.observe(signals(0.25, used=910))
    assert decision == Decision(1, "pressure 0.91 >= 0.85 for 0.20 s")


def test_goes_up_when_the_queue_is_blocked_for_long_enough(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    made = drive(
        policy,
        lambda now, level: signals(
            now, used=700, level=level, waiting=3, oldest_wait_s=now, blocked=True
        ),
        seconds=0.5,
    )
    (now, decision), *rest = made
    assert now == pytest.approx(0.1 + 0.2, abs=2 * TICK)
    assert decision.reason.startswith("admission blocked, oldest wait 0.3")
    assert decision.target == 1
    assert rest == []


@pytest.mark.parametrize(
    "calm_about", [{"blocked": False, "oldest_wait_s": 9.0}, {"blocked": True}]
)
def test_a_queue_that_is_young_or_not_blocked_is_no_reason(
    signals: MakeSignals, calm_about: dict[str, Any]
) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    made = drive(
        policy, lambda now, level: signals(now, used=700, waiting=3, **calm_about), seconds=5
    )
    assert made == []


def test_who_waits_although_there_is_room_is_a_reason_once_a_wait_is_given(
    signals: MakeSignals,
) -> None:
    """Prompts take time, not memory: level 3 is fast enough for them."""
    policy = ThresholdPolicy(replace(OPTIONS, enter_late_s=0.5), TOP)

    def late_below_3(now: float, level: int) -> Signals:
        return signals(now, 300, level, waiting=3, oldest_wait_s=0.3 if level >= 3 else 0.6)

    (first, second) = drive(policy, late_below_3, seconds=20)
    assert [first[1].target, second[1].target] == [1, 3]
    assert first[1].reason == "late, oldest wait 0.60 s >= 0.50 s for 0.20 s"
    over = drive(policy, lambda now, level: signals(now, 300, level), 5, level=3, begin=20)
    assert targets(over) == [0], "above half of the wait precision does not return, below it does"


def test_a_break_counts_against_the_hold_as_long_as_it_was(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    for now in (0.0, 0.1, 0.19):
        assert policy.observe(signals(now, used=900)) is None
    assert policy.observe(signals(0.22, used=849)) is None  # 0.19 s minus 0.03
    for now in (0.23, 0.26):
        assert policy.observe(signals(now, used=900)) is None
    assert policy.observe(signals(0.28, used=900)) is not None  # and 0.05, first reading apart


def test_room_for_a_step_now_and_then_does_not_hide_a_shortage(signals: MakeSignals) -> None:
    """A request ends every 0.15 s, and for two steps the next one has not been tried."""
    policy = ThresholdPolicy(OPTIONS, TOP)

    def short(now: float, level: int) -> Signals:
        tried = now % 0.15 >= 0.04
        return signals(now, 700, level, waiting=3, oldest_wait_s=2.0, blocked=tried)

    made = drive(policy, short, seconds=1.0, tick=0.02)
    assert targets(made)[:1] == [1] and made[0][0] < 0.5


def test_full_pages_climb_to_the_top_by_growing_steps(signals: MakeSignals) -> None:
    made = drive(
        ThresholdPolicy(OPTIONS, TOP),
        lambda now, level: signals(now, used=1000 + 500 * level, level=level),
        seconds=10,
    )
    assert targets(made) == [1, 3, 7]
    times = [now for now, _ in made]
    assert all(later - now >= 1.0 for now, later in itertools.pairwise(times))


def test_a_pause_in_the_pressure_returns_to_single_steps(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)

    def full(now: float, level: int) -> Signals:
        return signals(now, used=1000 + 500 * level, level=level)

    assert targets(drive(policy, full, seconds=0.5)) == [1]
    assert policy.observe(signals(0.5, used=1000, level=1)) is None
    assert targets(drive(policy, full, seconds=1.5, level=1, begin=0.6)) == [2]


def test_lent_pages_that_suffice_stop_the_climb(signals: MakeSignals) -> None:
    made = drive(
        ThresholdPolicy(OPTIONS, TOP),
        lambda now, level: signals(now, used=950, level=level),
        seconds=60,
    )
    assert targets(made) == [1]


def test_falls_straight_to_full_precision(signals: MakeSignals) -> None:
    made = drive(
        ThresholdPolicy(OPTIONS, TOP),
        lambda now, level: signals(now, used=300, level=level),
        seconds=10,
        level=5,
    )
    assert made == [(2.0, Decision(0, "demand 0.30 <= 0.60 and nothing is held up for 2.00 s"))]


@pytest.mark.parametrize("wait", [{"blocked": True}, {"waiting_tokens": 400}])
def test_does_not_fall_while_a_request_finds_no_room(
    signals: MakeSignals, wait: dict[str, Any]
) -> None:
    made = drive(
        ThresholdPolicy(OPTIONS, TOP),
        lambda now, level: signals(now, used=300, level=level, waiting=1, **wait),
        seconds=10,
        level=2,
    )
    assert made == []


def test_falls_while_requests_pass_through_the_queue(signals: MakeSignals) -> None:
    made = drive(
        ThresholdPolicy(OPTIONS, TOP),
        lambda now, level: signals(now, used=300, level=level, waiting=1, waiting_tokens=200),
        seconds=2.5,
        level=2,
    )
    assert [decision.target for _, decision in made] == [0]


def test_stays_between_the_thresholds(signals: MakeSignals) -> None:
    reading = lambda now, level: signals(now, used=700, level=level)  # noqa: E731
    assert drive(ThresholdPolicy(OPTIONS, TOP), reading, seconds=30) == []
    assert drive(ThresholdPolicy(OPTIONS, TOP), reading, seconds=30, level=3) == []


@pytest.mark.parametrize(("max_level", "highest"), [(None, TOP), (3, 3), (0, None), (99, TOP)])
def test_max_level_is_a_ceiling(
    signals: MakeSignals, max_level: int | None, highest: int | None
) -> None:
    made = drive(
        ThresholdPolicy(replace(OPTIONS, max_level=max_level), TOP),
        lambda now, level: signals(now, used=1000 + 500 * level, level=level),
        seconds=20,
    )
    assert (targets(made)[-1] if made else None) == highest


def test_repeats_a_decision_that_is_not_carried_out(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    wanted = [policy.observe(signals(n / 10, used=900)) for n in range(10)]
    assert [d.target for d in wanted if d is not None] == [1] * 8


def test_a_move_it_did_not_ask_for_starts_dwell_and_hold(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    for now in (0.0, 0.1, 0.15):
        policy.observe(signals(now, used=900))
    policy.moved(0.18, 2)
    made = drive(
        policy,
        lambda now, level: signals(now, used=1000 + 500 * level, level=level),
        seconds=1.5,
        level=2,
        begin=0.2,
    )
    assert made[0][0] >= 0.18 + 1.0
    assert made[0][1].target == 4


def test_a_move_it_did_not_ask_for_restarts_the_wait_to_fall(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    for index in range(8):
        policy.observe(signals(index / 4, used=300, level=2))
    policy.moved(1.9, 1)
    made = drive(
        policy,
        lambda now, level: signals(now, used=300, level=level),
        seconds=3,
        level=1,
        begin=2.0,
    )
    assert [now for now, _ in made] == [4.0]


def test_a_rolled_back_move_is_tried_again_after_the_dwell(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    tries = []
    for index in range(200):
        now = index * TICK
        if policy.observe(signals(now, used=900)) is not None:
            tries.append(now)
            policy.moved(now, 0)
    assert len(tries) == 3
    assert all(b - a >= 1.0 for a, b in itertools.pairwise(tries))


def test_a_clock_gap_is_no_evidence(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    assert policy.observe(signals(0.0, used=900)) is None
    assert policy.observe(signals(3600.0, used=900)) is None
    assert policy.observe(signals(3600.05, used=900)) is None
    assert policy.observe(signals(3600.15, used=900)) is not None


def test_a_clock_that_steps_back_is_no_evidence_and_no_obstacle(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    assert policy.observe(signals(100.0, used=900)) is None
    assert policy.observe(signals(50.0, used=900)) is None
    assert policy.observe(signals(50.1, used=900)) is None
    assert policy.observe(signals(50.25, used=900)) is not None


def test_slow_ticks_decide_at_the_third_reading(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    made = drive(
        policy, lambda now, level: signals(now, used=900, level=level), seconds=12, tick=3.0
    )
    assert [now for now, _ in made] == [6.0]


def test_idle_ticks_of_a_second_let_it_fall(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    made = drive(policy, lambda now, level: signals(now, level=level), seconds=5, level=1, tick=1.0)
    assert made[0][0] == 2.0


def test_without_holds_and_dwell_the_first_reading_decides(signals: MakeSignals) -> None:
    eager = replace(OPTIONS, enter_hold_s=0.0, leave_hold_s=0.0, min_dwell_s=0.0)
    policy = ThresholdPolicy(eager, TOP)
    assert policy.observe(signals(0.0, used=850)) is not None
    assert policy.observe(signals(0.0, used=600, level=1)) == Decision(
        0, "demand 0.60 <= 0.60 and nothing is held up for 0.00 s"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"leave_pressure": 0.85}, "below the second"),
        ({"leave_pressure": 0.9}, "below the second"),
        ({"leave_pressure": -0.1}, "0 or more"),
        ({"enter_pressure": 0.0}, "--morph-enter-pressure is 0.0"),
        ({"enter_pressure": 1.1}, "--morph-enter-pressure is 1.1"),
        ({"enter_pressure": float("nan")}, "--morph-enter-pressure is nan"),
        ({"max_level": -1}, "--morph-max-level is -1"),
        ({"enter_hold_s": -0.1}, "--morph-enter-hold-s is -0.1"),
        ({"leave_hold_s": float("nan")}, "--morph-leave-hold-s is nan"),
        ({"min_dwell_s": float("inf")}, "--morph-min-dwell-s is inf"),
        ({"enter_queue_delay_s": -1.0}, "--morph-enter-queue-delay-s is -1.0"),
        ({"enter_late_s": 0.0}, "--morph-enter-late-s is 0.0: give seconds above 0"),
    ],
)
def test_contradicting_options_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThresholdPolicy(replace(OPTIONS, **change), TOP)


def test_describe_names_every_parameter() -> None:
    described = ThresholdPolicy(replace(OPTIONS, max_level=3), TOP).describe()
    assert described["name"] == "threshold"
    assert described["max_level"] == 3
    for name in ("enter_pressure", "leave_pressure", "enter_hold_s", "leave_hold_s"):
        assert described[name] == getattr(OPTIONS, name)


options = st.builds(
    replace,
    st.just(OPTIONS),
    enter_pressure=st.sampled_from([0.7, 0.85, 1.0]),
    leave_pressure=st.sampled_from([0.1, 0.5, 0.6]),
    enter_hold_s=st.sampled_from([0.0, 0.05, 0.2, 1.0]),
    leave_hold_s=st.sampled_from([0.0, 0.3, 2.0]),
    min_dwell_s=st.sampled_from([0.0, 0.5, 1.0]),
    max_level=st.sampled_from([None, 0, 1, 2, 5]),
)
gaps = st.one_of(
    st.sampled_from([0.0, 0.001, 0.02, 0.02, 0.02, 0.1, 1.0]), st.floats(0, 5), st.just(1000.0)
)
executor = st.sampled_from(["carry out", "carry out", "ignore", "roll back"])
ticks = st.lists(
    st.tuples(
        gaps,
        st.one_of(st.sampled_from([0, 500, 1000]), st.integers(0, 1000)),  # per mille of capacity
        st.booleans(),  # whether a request waits, blocked for long
        executor,
        st.one_of(st.none(), st.none(), st.none(), st.integers(0, 4)),  # a move nobody asked for
    ),
    max_size=150,
)


class Net:
    """Most time that a condition can have held longer than not, up to each reading."""

    def __init__(self) -> None:
        self.seconds, self.last, self.held = 0.0, float("inf"), False

    def observe(self, now: float, condition: bool) -> None:
        step = max(0.0, now - self.last)
        if condition and self.held:
            self.seconds += step
        elif not condition:
            self.seconds = max(0.0, self.seconds - step)
        self.last, self.held = now, condition


class Since:
    """When a condition last became true, as long as it is."""

    def __init__(self) -> None:
        self.moment: float | None = None

    def observe(self, now: float, condition: bool) -> None:
        self.moment = (now if self.moment is None else self.moment) if condition else None


@given(options, st.integers(0, 4), ticks)
@settings(deadline=None)
def test_acts_only_in_range_after_dwell_and_hold(
    signals: MakeSignals, options: PolicyOptions, top_level: int, ticks: list[Tick]
) -> None:
    policy = ThresholdPolicy(options, top_level)
    ceiling = top_level if options.max_level is None else min(options.max_level, top_level)
    now, level, moved_at = 0.0, 0, float("-inf")
    crowded, calm = Net(), Since()
    for gap, fill, blocked, outcome, foreign_level in ticks:
        now += gap
        capacity = 1000 + 500 * level
        used = fill * capacity // 1000
        reading = signals(
            now, used, level, waiting=int(blocked), oldest_wait_s=9.0 * blocked, blocked=blocked
        )
        crowded.observe(now, blocked or used / capacity >= options.enter_pressure - 1e-9)
        calm.observe(now, not blocked and used / 1000 <= options.leave_pressure)
        decision = policy.observe(reading)
        new_level = level
        if decision is not None:
            assert 0 <= decision.target <= ceiling
            assert decision.target != level
            assert now - moved_at >= options.min_dwell_s
            rises = decision.target > level
            if rises:
                assert crowded.held and crowded.seconds >= options.enter_hold_s - 1e-9
            else:
                assert decision.target == 0 and calm.moment is not None
                assert now - calm.moment >= options.leave_hold_s - 1e-9
            new_level = decision.target if outcome == "carry out" else level
        carried_out = decision is not None and outcome != "ignore"
        if foreign_level is not None:
            carried_out, new_level = True, min(foreign_level, top_level)
        if carried_out:
            level, moved_at = new_level, now
            policy.moved(now, level)
            crowded, calm = Net(), Since()


@given(options, st.integers(0, 6), st.floats(0.001, 2.0), st.booleans())
@settings(deadline=None)
def test_lasting_pressure_reaches_the_ceiling_and_its_end_returns_to_zero(
    signals: MakeSignals, options: PolicyOptions, top_level: int, tick: float, by_queue: bool
) -> None:
    policy = ThresholdPolicy(options, top_level)
    ceiling = top_level if options.max_level is None else min(options.max_level, top_level)

    def crowded(now: float, level: int) -> Signals:
        if by_queue:
            return signals(now, 200, level, waiting=1, oldest_wait_s=1.0, blocked=True)
        return signals(now, 1000 + 500 * level, level)

    # The longest hold or dwell, for every level, and two readings more for each.
    seconds = (2.5 + 3 * tick) * (ceiling + 1)
    made = drive(policy, crowded, seconds, tick=tick)
    assert (targets(made) or [0])[-1] == ceiling
    assert targets(made) == sorted(set(targets(made)))
    made = drive(
        policy,
        lambda now, level: signals(now, 50, level),
        3.5 + 6 * tick,
        level=ceiling,
        begin=seconds + tick,
        tick=tick,
    )
    assert targets(made) == ([0] if ceiling else [])


@given(
    st.integers(0, 3),
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 4)).map(lambda s: (s[0], s[0] + s[1])),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from([0, 700]),
)
def test_pressure_that_alternates_faster_than_the_hold_moves_nothing(
    signals: MakeSignals, level: int, spans: list[tuple[int, int]], low: int
) -> None:
    """Full for under 0.2 s, then not for as long or longer, again and again; low spans are far
    shorter than 2 s.
    """
    policy = ThresholdPolicy(OPTIONS, TOP)
    now = 0.0
    for full_ticks, low_ticks in spans:
        for used, count in ((1000 + 500 * level, full_ticks), (low, low_ticks)):
            for _ in range(count):
                assert policy.observe(signals(now, used, level)) is None
                now += 0.02


def test_state_does_not_grow(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    for tick in range(100_000):
        policy.observe(signals(tick * 0.001, used=tick % 1000))
    containers = [v for v in vars(policy).values() if isinstance(v, list | dict | set | tuple)]
    assert containers == []


PAGES = tuple(1000 + 500 * level for level in range(TOP + 1))


@pytest.mark.parametrize(
    ("used", "waiting_tokens", "expected"),
    [
        (860, 0, 1),  # 860 / 0.85 fits level 1's 1,500 pages
        (900, 1000, 3),  # 1,900 / 0.85 needs 2,235
        (900, 100_000, TOP),  # more than every level has
    ],
)
def test_goes_straight_to_the_level_that_holds_what_waits(
    signals: MakeSignals, used: int, waiting_tokens: int, expected: int
) -> None:
    policy = ThresholdPolicy(OPTIONS, TOP)
    readings = [
        signals(n / 10, used=used, waiting_tokens=waiting_tokens, level_pages=PAGES)
        for n in range(4)
    ]
    decisions = [policy.observe(reading) for reading in readings]
    assert decisions[:2] == [None, None]  # the hold comes first
    assert decisions[-1] is not None
    assert decisions[-1].target == expected


def test_a_jump_respects_the_highest_level(signals: MakeSignals) -> None:
    policy = ThresholdPolicy(replace(OPTIONS, max_level=2), TOP)
    readings = [signals(n / 10, used=900, waiting_tokens=9999, level_pages=PAGES) for n in range(4)]
    assert [d.target for d in map(policy.observe, readings) if d is not None][-1] == 2
