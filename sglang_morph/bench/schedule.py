"""In which order the arms run: counterbalanced, and cut into slots where time is limited.

Runs of one block are compared with the reference arm's run of the same block, so that what differs
between days or machines falls out. Without a time budget a block is a repetition; with one it is a
slot, and every slot has a run of the reference arm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sglang_morph.bench.plan import PlanError


class ScheduledRun(msgspec.Struct, frozen=True):
    """A fresh server of `arm`. `repetition` counts the arm's runs from 0."""

    block: int
    arm: str
    repetition: int

    @property
    def folder(self) -> str:
        return f"block{self.block:02d}-{self.arm}-{self.repetition}"


def repetition_order(arms: Sequence[str], repetition: int) -> list[str]:
    """Each repetition starts one arm later than the pair before it, every second runs backwards.

    So over an even number of repetitions every arm has the same mean position.
    """
    turn = (repetition // 2) % len(arms)
    order = [*arms[turn:], *arms[:turn]]
    return order if repetition % 2 == 0 else order[::-1]


def make_schedule(arms: Sequence[str], repetitions: int) -> list[ScheduledRun]:
    """All arms in every repetition."""
    return [
        ScheduledRun(repetition, arm, repetition)
        for repetition in range(repetitions)
        for arm in repetition_order(arms, repetition)
    ]


def make_slots(
    arms: Sequence[str],
    reference: str,
    repetitions: int,
    seconds: Mapping[str, float],
    budget_s: float,
) -> list[ScheduledRun]:
    """The same runs in slots of at most `budget_s`, each with one of `reference`.

    `seconds` is what a run of each arm takes. The reference runs first in every other slot and last
    in the rest. Raises `PlanError` if a run of an arm and one of the reference don't fit a slot.
    """
    others = [arm for arm in arms if arm != reference]
    for arm in arms:
        needed = seconds[reference] + (seconds[arm] if arm != reference else 0.0)
        if needed > budget_s:
            raise PlanError(
                f"a slot of {budget_s:.0f} s is too short: {arm} and {reference} together take "
                f"about {needed:.0f} s; give a longer --time-budget or shorter workloads"
            )
    pending = [
        (arm, repetition)
        for repetition in range(repetitions)
        for arm in (repetition_order(others, repetition) if others else [])
    ]
    slots: list[list[tuple[str, int]]] = []
    room = 0.0
    for arm, repetition in pending:
        if not slots or seconds[arm] > room:
            slots.append([])
            room = budget_s - seconds[reference]
        slots[-1].append((arm, repetition))
        room -= seconds[arm]
    while len(slots) < (1 if others else repetitions):
        slots.append([])
    runs = []
    for block, slot in enumerate(slots):
        common = (reference, block)
        ordered = [common, *slot] if block % 2 == 0 else [*slot, common]
        runs += [ScheduledRun(block, arm, repetition) for arm, repetition in ordered]
    return runs
