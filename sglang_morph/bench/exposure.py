"""At which precision level output tokens came, from arrival times and the server's event log."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_morph.bench.outcome import Outcome

LevelChange = tuple[float, int]
"""UNIX seconds, and the level from then on."""


def level_changes(events: Sequence[Mapping[str, Any]]) -> list[LevelChange]:
    """Completed transitions of an event log, in order."""
    return [
        (event["time"], event["to"])
        for event in events
        if event["kind"] == "transition" and event["result"] == "completed"
    ]


def tokens_by_level(
    outcomes: Sequence[Outcome], started: float, changes: Sequence[LevelChange]
) -> dict[int, int]:
    """Output tokens of all `outcomes`, by the level when they came; level 0 before any change.

    `started` is time 0 of the outcomes in UNIX seconds. A token that came within a step of a change
    may be counted on its wrong side.
    """
    times = [time for time, _ in changes]
    tokens: Counter[int] = Counter()
    for outcome in outcomes:
        for at_s, count in zip(outcome.arrivals_s, outcome.arrival_tokens, strict=True):
            before = bisect_right(times, started + at_s)
            tokens[changes[before - 1][1] if before else 0] += count
    return dict(sorted(tokens.items()))


def full_precision_share(tokens: Mapping[int, int]) -> float | None:
    """Share of tokens at level 0; None of no tokens."""
    total = sum(tokens.values())
    return tokens.get(0, 0) / total if total else None


def quality_score(tokens: Mapping[int, int], quality: Mapping[int, float]) -> float | None:
    """Mean of the levels' scores, weighted by tokens; None where a level used has no score."""
    total = sum(tokens.values())
    if not total or any(level not in quality for level, count in tokens.items() if count):
        return None
    return sum(count * quality[level] for level, count in tokens.items() if count) / total
