"""Searches, for each arm, the highest rate at which enough requests still meet the SLO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

RESULT = "capacity.json"


class Try(msgspec.Struct, frozen=True):
    rate: float
    """Requests a second offered."""
    attainment: float
    goodput: float


class Capacity(msgspec.Struct, frozen=True):
    """What the search found for one arm."""

    arm: str
    wanted: float
    """Attainment to keep."""
    tries: list[Try]
    origin: dict[str, str] = {}
    """Command, commit, date and hardware."""

    @property
    def sustained(self) -> float | None:
        """Highest rate kept below the lowest one that was not; None if even the first was not."""
        failed = self.failed
        kept = [
            t.rate
            for t in self.tries
            if t.attainment >= self.wanted and (failed is None or t.rate < failed)
        ]
        return max(kept, default=None)

    @property
    def failed(self) -> float | None:
        """Lowest rate at which too many requests missed; None if there was none."""
        return min((t.rate for t in self.tries if t.attainment < self.wanted), default=None)


def search(
    arm: str,
    measure: Callable[[float], Try],
    low: float,
    high: float,
    steps: int,
    wanted: float,
) -> Capacity:
    """Bisect between `low` and `high`, by ratio, with at most `steps` calls of `measure`.

    Tries `low` first and then `high`: the search ends there if the first fails or the second holds.
    """
    tries = [measure(low)]
    if tries[0].attainment >= wanted and steps > 1:
        tries.append(measure(high))
        if tries[1].attainment < wanted:
            while len(tries) < steps:
                middle = (low * high) ** 0.5
                tries.append(measure(middle))
                if tries[-1].attainment >= wanted:
                    low = middle
                else:
                    high = middle
    return Capacity(arm, wanted, tries)


def write_capacity(folder: Path, capacity: Capacity) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_bytes(msgspec.json.encode(capacity))


def read_capacities(output: Path) -> list[Capacity]:
    """Of all arms whose search is done, by name."""
    return [
        msgspec.json.decode(file.read_bytes(), type=Capacity)
        for file in sorted((output / "sweep").glob(f"*/{RESULT}"))
    ]
