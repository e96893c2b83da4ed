"""What replays and simulations found, as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from sglang_morph.policy_cli.replay import Replay
from sglang_morph.policy_cli.simulation import Outcome


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet. Seconds; `tpot_s` None sets no target."""

    ttft_s: float
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy's row. Times are seconds, shares are of 1."""

    policy: str
    offered: int
    answered: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    slo_missed: float
    """Of the offered requests; one without an answer missed it."""
    time_below_full: float
    tokens_below_full: float
    transitions: int
    max_transitions_per_minute: int
    """In any 60 s, emergencies included."""
    retractions: int
    retractions_avoided: int
    duration_s: float


def summarize(policy: str, outcome: Outcome, slo: Slo) -> Summary:
    ttft = [request.ttft_s for request in outcome.served]
    tpot = [request.tpot_s for request in outcome.served if request.tpot_s is not None]
    met = sum(
        request.ttft_s <= slo.ttft_s
        and (slo.tpot_s is None or request.tpot_s is None or request.tpot_s <= slo.tpot_s)
        for request in outcome.served
    )
    lowered = sum(s for level, s in outcome.seconds_at_level.items() if level > 0)
    total = sum(outcome.seconds_at_level.values())
    return Summary(
        policy=policy,
        offered=outcome.offered,
        answered=len(outcome.served),
        ttft_p50_s=percentile(ttft, 50),
        ttft_p95_s=percentile(ttft, 95),
        ttft_p99_s=percentile(ttft, 99),
        tpot_p50_s=percentile(tpot, 50),
        tpot_p95_s=percentile(tpot, 95),
        slo_missed=1 - met / outcome.offered if outcome.offered else 0.0,
        time_below_full=lowered / total if total else 0.0,
        tokens_below_full=outcome.lowered_tokens / outcome.tokens if outcome.tokens else 0.0,
        transitions=len(outcome.transitions),
        max_transitions_per_minute=most_within([t.at_s for t in outcome.transitions], 60.0),
        retractions=outcome.retractions,
        retractions_avoided=outcome.retractions_avoided,
        duration_s=outcome.duration_s,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """NaN of nothing."""
    return float(np.percentile(values, percent)) if values else math.nan


def most_within(moments: Sequence[float], span_s: float) -> int:
    """Most of the rising `moments` in any half-open span."""
    most = first = 0
    for index, moment in enumerate(moments):
        while moment - moments[first] >= span_s:
            first += 1
        most = max(most, index - first + 1)
    return most


_COLUMNS = (
    "policy",
    "answered",
    "TTFT P50 / P95, s",
    "TPOT P50 / P95, ms",
    "missed SLO",
    "time low",
    "tokens low",
    "moves, most in a minute",
    "retracted, spared",
)


def summary_cells(summary: Summary) -> tuple[str, ...]:
    """One text per column of the comparison."""
    return (
        summary.policy,
        f"{summary.answered / summary.offered:.1%}",
        f"{summary.ttft_p50_s:.3f} / {summary.ttft_p95_s:.3f}",
        f"{1000 * summary.tpot_p50_s:.1f} / {1000 * summary.tpot_p95_s:.1f}",
        f"{summary.slo_missed:.1%}",
        f"{summary.time_below_full:.1%}",
        f"{summary.tokens_below_full:.1%}",
        f"{summary.transitions}, {summary.max_transitions_per_minute}",
        f"{summary.retractions}, {summary.retractions_avoided}",
    )


def comparison_table(title: str, summaries: Sequence[Summary]) -> Table:
    table = Table(title=title)
    for column in _COLUMNS:
        is_name = column == "policy"
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for summary in summaries:
        table.add_row(*summary_cells(summary))
    return table


def markdown_table(summaries: Sequence[Summary]) -> str:
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" + "|---:" * (len(_COLUMNS) - 1) + "|"]
    lines += ["| " + " | ".join(summary_cells(summary)) + " |" for summary in summaries]
    return "\n".join(lines)


def actions_table(replays: Sequence[Replay]) -> Table:
    """What happened and what each policy would have done, in order of time."""
    table = Table(title="When it would have acted, and what happened")
    for column in ("run", "s", "who", "level", "why"):
        table.add_column(column)
    rows = []
    runs = list({id(r.run): r.run for r in replays}.values())
    for number, run in enumerate(runs):
        rows += [(number, a.at_s, "happened", a) for a in run.happened]
        for found in (r for r in replays if r.run is run):
            rows += [(number, a.at_s, found.label, a) for a in found.actions]
    for number, at_s, who, action in sorted(rows, key=lambda row: row[:2]):
        move = f"{action.source} > {action.target}"
        table.add_row(str(number + 1), f"{at_s:.2f}", who, move, action.reason)
    return table


def agreement_table(replays: Sequence[Replay]) -> Table:
    table = Table(title="Policy against the recording")
    for column in ("policy", "run", "moves", "moves then", "s below full", "then", "agrees"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    runs = list({id(r.run): r.run for r in replays}.values())
    for found in replays:
        number = next(i for i, run in enumerate(runs) if run is found.run)
        table.add_row(
            found.label,
            str(number + 1),
            str(len(found.actions)),
            str(len(found.run.happened)),
            f"{found.seconds_below_full(found.levels):.1f}",
            f"{found.seconds_below_full(found.recorded_levels):.1f}",
            f"{found.agreement:.0%}",
        )
    return table
