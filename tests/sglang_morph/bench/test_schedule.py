from collections import Counter

import pytest

from sglang_morph.bench.plan import PlanError
from sglang_morph.bench.schedule import make_schedule, make_slots, repetition_order

ARMS = ["a", "b", "c", "d"]


def test_over_pairs_of_repetitions_every_arm_has_the_same_mean_position():
    positions = Counter()
    for repetition in range(4):
        for position, arm in enumerate(repetition_order(ARMS, repetition)):
            positions[arm] += position
    assert set(positions.values()) == {4 * 1.5}
    assert repetition_order(ARMS, 1) == ["d", "c", "b", "a"]


def test_a_block_is_a_repetition_of_all_arms():
    runs = make_schedule(ARMS, 3)
    assert Counter(run.arm for run in runs) == dict.fromkeys(ARMS, 3)
    assert all(run.block == run.repetition for run in runs)
    assert len({run.folder for run in runs}) == 12


def slots_of(runs):
    slots = {}
    for run in runs:
        slots.setdefault(run.block, []).append(run.arm)
    return list(slots.values())


def test_every_slot_keeps_the_budget_and_has_the_common_arm():
    seconds = dict.fromkeys(ARMS, 100.0)
    runs = make_slots(ARMS, "a", 3, seconds, budget_s=350.0)
    slots = slots_of(runs)
    assert all(100.0 * len(slot) <= 350.0 and slot.count("a") == 1 for slot in slots)
    assert [slot[0] == "a" for slot in slots] == [i % 2 == 0 for i in range(len(slots))]
    counts = Counter(run.arm for run in runs)
    assert counts == {"a": len(slots), "b": 3, "c": 3, "d": 3}
    assert len({run.folder for run in runs}) == len(runs)


def test_a_slot_too_short_is_refused_with_the_time_needed():
    with pytest.raises(PlanError, match="b and a together take about 200 s"):
        make_slots(["a", "b"], "a", 1, {"a": 100.0, "b": 100.0}, 150.0)


def test_one_arm_alone_still_gets_its_repetitions():
    assert len(make_slots(["a"], "a", 3, {"a": 10.0}, 100.0)) == 3
