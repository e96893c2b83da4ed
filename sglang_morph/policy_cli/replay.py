"""Runs a policy over the signals of an event log, and compares with what happened then.

What the server did shaped what was recorded, so a replay answers "when would it have acted", not
"how would it have gone" (the simulation does). The policy sees its own level: where that differs
from the recorded one, the capacity is that of its level, pages in use are cut to it, and what is
cut counts as waiting. Readings are as far apart as the log's sample interval, so holds shorter than
twice that last longer than in the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any

from sglang_morph.controller.policy import Policy
from sglang_morph.controller.signals import Signals
from sglang_morph.policy_cli.spec import PolicySpec

_FIELDS = {field.name for field in fields(Signals)}


class ReplayError(ValueError):
    """A log that can't be replayed. The message is one line with cause and remedy."""


@dataclass(frozen=True, slots=True)
class Action:
    """A level change: the policy's, or a recorded one."""

    at_s: float
    """Seconds since the run's first reading."""
    source: int
    target: int
    reason: str


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a server, out of its log."""

    readings: list[Signals]
    happened: list[Action]
    lent_pages: list[int]
    """Pages lent at each level: as seen, or in proportion where a level was never seen."""

    @property
    def top_level(self) -> int:
        return len(self.lent_pages) - 1

    def since_start(self, moment: float) -> float:
        return moment - self.readings[0].now


@dataclass(frozen=True, slots=True)
class Replay:
    """What a policy would have done in one run."""

    run: Run
    label: str
    actions: list[Action]
    levels: list[int] = field(default_factory=list)
    """The policy's level after each reading."""

    @property
    def agreement(self) -> float:
        """Share of time in which both are at full precision, or both below."""
        readings = self.run.readings
        same = total = 0.0
        for index, (before, after) in enumerate(pairwise(readings)):
            step = after.now - before.now
            total += step
            same += step if (self.levels[index] > 0) == (before.level > 0) else 0.0
        return same / total if total else 1.0

    def seconds_below_full(self, levels: Sequence[int]) -> float:
        steps = zip(pairwise(self.run.readings), levels, strict=False)
        return sum(after.now - before.now for (before, after), level in steps if level > 0)

    @property
    def recorded_levels(self) -> list[int]:
        return [reading.level for reading in self.run.readings]


def runs_of(rows: Sequence[Mapping[str, Any]], top_level: int | None = None) -> list[Run]:
    """The runs in an event log that have readings. `top_level` None: the highest level seen.

    Raises `ReplayError`.
    """
    chunks: list[list[Mapping[str, Any]]] = []
    for row in rows:
        if row["kind"] == "start" or not chunks:
            chunks.append([])
        chunks[-1].append(row)
    runs = [_run(chunk, top_level) for chunk in chunks if _has_readings(chunk)]
    if not runs:
        raise ReplayError(
            "the event log has no `signals` rows; record one with --morph-event-log and load"
        )
    return runs


def _has_readings(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["kind"] == "signals" for row in rows)


def _run(rows: Sequence[Mapping[str, Any]], top_level: int | None) -> Run:
    readings = [_reading(row) for row in rows if row["kind"] == "signals"]
    first = next(row for row in rows if row["kind"] == "signals")
    # Events have no monotonic time; readings have both.
    offset = readings[0].now - float(first["time"])
    start = readings[0].now
    happened = [
        Action(float(row["time"]) + offset - start, row["from"], row["to"], row["reason"])
        for row in rows
        if row["kind"] == "transition" and row["result"] == "completed"
    ]
    seen = [reading.level for reading in readings] + [action.target for action in happened]
    top = max(1, *seen) if top_level is None else top_level
    maximum = next((row["maximum_pages"] for row in rows if row["kind"] == "start"), None)
    return Run(readings, happened, _lent_pages(readings, top, maximum))


def _reading(row: Mapping[str, Any]) -> Signals:
    """Fields that an older log lacks take their default."""
    try:
        return Signals(**{name: value for name, value in row.items() if name in _FIELDS})
    except TypeError as error:
        raise ReplayError(f"a `signals` row is not complete: {error}") from error


def _lent_pages(readings: Sequence[Signals], top: int, maximum: int | None) -> list[int]:
    base = readings[0].base_pages
    seen = {0: 0}
    for reading in readings:
        lent = reading.capacity_pages - base
        seen[reading.level] = max(seen.get(reading.level, 0), lent)
    last = seen.get(top) or (maximum - base if maximum is not None else base * top)
    by_level = [seen.get(level, round(last * level / top)) for level in range(top + 1)]
    return list(accumulate(by_level, max))


def replay(run: Run, spec: PolicySpec) -> Replay:
    """Raises `SpecError`."""
    policy = spec.create(run.top_level)
    level = spec.first_level(run.top_level)
    result = Replay(run, spec.label, [])
    for reading in run.readings:
        level = _step(policy, reading, level, result)
        result.levels.append(level)
    return result


def _step(policy: Policy, reading: Signals, level: int, result: Replay) -> int:
    decision = policy.observe(as_seen_at(reading, level, result.run.lent_pages))
    if decision is None:
        return level
    # The server would put this restore off: what is in use is more than would remain.
    room = reading.base_pages + result.run.lent_pages[decision.target]
    if decision.target < level and reading.used_pages > room:
        return level
    at_s = result.run.since_start(reading.now)
    result.actions.append(Action(at_s, level, decision.target, decision.reason))
    policy.moved(reading.now, decision.target)
    return decision.target


def as_seen_at(reading: Signals, level: int, lent_pages: Sequence[int]) -> Signals:
    """The reading as a server at `level` would have had it."""
    if reading.level == level:
        return reading
    capacity = reading.base_pages + lent_pages[level]
    used = min(reading.used_pages, capacity)
    excess = reading.used_pages - used
    evictable = min(reading.evictable_pages, capacity - used)
    return replace(
        reading,
        level=level,
        capacity_pages=capacity,
        free_pages=capacity - used - evictable,
        evictable_pages=evictable,
        waiting=max(reading.waiting, 1) if excess else reading.waiting,
        waiting_tokens=reading.waiting_tokens + excess,
        admission_blocked=reading.admission_blocked or excess > 0,
    )
