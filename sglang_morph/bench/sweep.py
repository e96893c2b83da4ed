"""Searches, for each arm, the highest rate at which enough requests still meet the SLO."""

from __future__ import annotations

from collections.abc import Sequence
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
    workload: str
    wanted: float
    """Attainment to keep."""
    tries: list[Try]
    over: bool
    """Whether the search is; it may have been cut off."""
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
    def goodputs(self) -> list[tuple[float, float]]:
        """Requests a second offered, and of those that met the SLO, of every try."""
        return [(t.rate, t.goodput) for t in self.tries]

    @property
    def failed(self) -> float | None:
        """Lowest rate at which too many requests missed; None if there was none."""
        return min((t.rate for t in self.tries if t.attainment < self.wanted), default=None)


def next_rate(
    tries: Sequence[Try], low: float, high: float, steps: int, wanted: float
) -> float | None:
    """What to try after `tries`; None where the search is over, after at most `steps` of them.

    Bisects by ratio. `low` and `high` themselves are never tried, which would cost two tries: where
    the capacity lies beyond one, all tries fail or all hold.
    """
    if len(tries) >= steps:
        return None
    kept = [t.rate for t in tries if t.attainment >= wanted]
    missed = [t.rate for t in tries if t.attainment < wanted]
    return (max(kept, default=low) * min(missed, default=high)) ** 0.5


def write_capacity(folder: Path, capacity: Capacity) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_bytes(msgspec.json.encode(capacity))


def search_folder(output: Path, workload: str, arm: str) -> Path:
    """Where a search leaves its result, and the records of the rates it tried."""
    return output / "sweep" / workload / arm


def try_name(workload: str, rate: float) -> str:
    """Of the record of a rate that was tried."""
    return f"{workload}@{rate:.3f}"


def read_capacities(output: Path) -> list[Capacity]:
    """Of all arms that tried a rate, by workload and name."""
    return [
        msgspec.json.decode(file.read_bytes(), type=Capacity)
        for file in sorted((output / "sweep").glob(f"*/*/{RESULT}"))
    ]
