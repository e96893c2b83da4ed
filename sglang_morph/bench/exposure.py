"""At which precision level tokens were computed.

A morphing server tells it with the last token of each answer. For one that doesn't, output tokens
are sorted by arrival time and the server's event log.
"""

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


def take_exposure(meta: Mapping[str, Any], outcome: Outcome) -> None:
    """Keep what an answer's metadata says of the levels that it was computed at."""
    told = meta.get("morph")
    if isinstance(told, Mapping):
        outcome.generated_by_level = _by_level(told["generated_tokens"])
        outcome.prefilled_by_level = _by_level(told["prefilled_tokens"])
        outcome.reused_lowered = told["reused_lowered_tokens"]


def _by_level(told: Mapping[str, int]) -> list[int]:
    """Tokens at level 0, 1, ... from `{"0": tokens, "3": tokens}`."""
    levels = {int(level): count for level, count in told.items()}
    return [levels.get(level, 0) for level in range(max(levels, default=-1) + 1)]


def tokens_by_level(
    outcomes: Sequence[Outcome], started: float, changes: Sequence[LevelChange]
) -> dict[int, int]:
    """Output tokens of all `outcomes` by level, as the server told it or else by when they came.

    `started` is time 0 of the outcomes in UNIX seconds. Before any change the level is 0. A token
    that came within a step of a change may be counted on its wrong side.
    """
    times = [time for time, _ in changes]
    tokens: Counter[int] = Counter()
    for outcome in outcomes:
        if outcome.generated_by_level is not None:
            tokens.update(dict(enumerate(outcome.generated_by_level)))
            continue
        for at_s, count in zip(outcome.arrivals_s, outcome.arrival_tokens, strict=True):
            before = bisect_right(times, started + at_s)
            tokens[changes[before - 1][1] if before else 0] += count
    return {level: count for level, count in sorted(tokens.items()) if count}


def prefilled_by_level(outcomes: Sequence[Outcome]) -> dict[int, int]:
    """Prompt tokens computed by level, of the outcomes whose server told it."""
    tokens: Counter[int] = Counter()
    for outcome in outcomes:
        tokens.update(dict(enumerate(outcome.prefilled_by_level or ())))
    return {level: count for level, count in sorted(tokens.items()) if count}


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
