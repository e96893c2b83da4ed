"""What the demo found: numbers per arm, what must hold, the table, and the results file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.table import Table

from sglang_morph.demo.arm import ArmRun
from sglang_morph.demo.provenance import Provenance


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One column of the table. Times are seconds, capacities are tokens."""

    backend: str
    requests: int
    completed: int
    failed: int
    retractions: int
    capacity_first: int
    capacity_lowest: int
    capacity_peak: int
    capacity_last: int
    levels: list[int]
    """Precision levels in the order visited."""
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    output_tokens: int
    wall_s: float
    transitions: int
    final_level: int
    weights_identical: bool | None
    """None for a server that never touches its weights."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of the demo, named `demo/arm/what`. All that have a bar must hold."""

    name: str
    value: float | int | bool
    unit: str
    bar: str = ""
    """What the value must satisfy, readable; empty for one that is only reported."""
    holds: bool = True


def summarize(run: ArmRun) -> ArmSummary:
    completed = [result for result in run.results if result.ok]
    capacities = [sample.capacity for sample in run.samples]
    ttft = [result.ttft_s for result in run.results if result.ttft_s is not None]
    tpot = [result.tpot_s for result in run.results if result.tpot_s is not None]
    return ArmSummary(
        backend=run.setup.backend,
        requests=len(run.results),
        completed=len(completed),
        failed=len(run.results) - len(completed),
        retractions=run.retractions,
        capacity_first=capacities[0],
        capacity_lowest=min(capacities),
        capacity_peak=max(capacities),
        capacity_last=capacities[-1],
        levels=[run.samples[0].level, *(transition["to"] for transition in run.transitions)],
        ttft_p50=_percentile(ttft, 50),
        ttft_p95=_percentile(ttft, 95),
        tpot_p50=_percentile(tpot, 50),
        tpot_p95=_percentile(tpot, 95),
        output_tokens=sum(result.output_tokens for result in run.results),
        wall_s=run.wall_s,
        transitions=len(run.transitions),
        final_level=0 if run.weights is None else run.weights.level,
        weights_identical=None if run.weights is None else run.weights.identical,
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")


def checks(static: ArmSummary, morph: ArmSummary) -> list[Measure]:
    """What must hold for the demo to succeed."""
    base = morph.capacity_first
    highest = max(morph.levels)
    same = bool(morph.weights_identical)
    return [
        _all_completed(static),
        _all_completed(morph),
        _check(morph, "base_capacity", base, "tokens", "= static's", base == static.capacity_first),
        _check(morph, "highest_level", highest, "", ">= 1", highest >= 1),
        _check(
            morph,
            "peak_capacity",
            morph.capacity_peak,
            "tokens",
            f"> {base}",
            morph.capacity_peak > base,
        ),
        _check(morph, "final_level", morph.final_level, "", "= 0", morph.final_level == 0),
        _check(
            morph,
            "final_capacity",
            morph.capacity_last,
            "tokens",
            f"= {base}",
            morph.capacity_last == base,
        ),
        _check(morph, "weights_identical", same, "", "is true", same),
    ]


def _all_completed(arm: ArmSummary) -> Measure:
    return _check(arm, "completed", arm.completed, "requests", f"= {arm.requests}", arm.failed == 0)


def _check(arm: ArmSummary, what: str, value: int, unit: str, bar: str, holds: bool) -> Measure:
    return Measure(f"demo/{arm.backend}/{what}", value, unit, bar, holds)


def measures(arm: ArmSummary) -> list[Measure]:
    """The numbers of one arm that have no bar, those that there are."""
    values: list[tuple[str, float | int, str]] = [
        ("ttft_p50", round(arm.ttft_p50, 3), "s"),
        ("ttft_p95", round(arm.ttft_p95, 3), "s"),
        ("tpot_p50", round(arm.tpot_p50, 4), "s"),
        ("tpot_p95", round(arm.tpot_p95, 4), "s"),
        ("wall_time", round(arm.wall_s, 1), "s"),
        ("output_tokens", arm.output_tokens, "tokens"),
        ("retractions", arm.retractions, "requests"),
        ("lowest_capacity", arm.capacity_lowest, "tokens"),
        ("transitions", arm.transitions, "level changes"),
    ]
    return [
        Measure(f"demo/{arm.backend}/{what}", value, unit)
        for what, value, unit in values
        if not math.isnan(value)  # no answer came
    ]


def comparison_table(arms: Sequence[ArmSummary]) -> Table:
    """A row per measure, a column per arm."""
    table = Table(title="The same burst, the same memory")
    table.add_column("")
    for arm in arms:
        table.add_column(arm.backend, justify="right")
    for label, *values in zip(_LABELS, *map(_cells, arms), strict=True):
        table.add_row(label, *values)
    return table


_LABELS = (
    "requests completed",
    "requests failed",
    "retractions",
    "KV capacity, lowest / peak (tokens)",
    "precision levels visited",
    "level changes",
    "TTFT P50 / P95 (s)",
    "TPOT P50 / P95 (ms)",
    "output tokens",
    "wall time (s)",
    "weights afterwards",
)


def _cells(arm: ArmSummary) -> tuple[str, ...]:
    """One text per label."""
    weights = {None: "not touched", True: "identical bytes", False: "DIFFERENT"}
    return (
        f"{arm.completed} of {arm.requests}",
        f"{arm.failed}",
        f"{arm.retractions}",
        f"{arm.capacity_lowest:,} / {arm.capacity_peak:,}",
        " > ".join(map(str, arm.levels)),
        f"{arm.transitions}",
        f"{arm.ttft_p50:.2f} / {arm.ttft_p95:.2f}",
        f"{1000 * arm.tpot_p50:.0f} / {1000 * arm.tpot_p95:.0f}",
        f"{arm.output_tokens:,}",
        f"{arm.wall_s:.1f}",
        weights[arm.weights_identical],
    )


def checks_table(results: Sequence[Measure]) -> Table:
    table = Table(title="What must hold")
    for column in ("check", "value", "bar", "holds"):
        table.add_column(column)
    for check in results:
        holds = "[green]yes[/]" if check.holds else "[bold red]NO[/]"
        table.add_row(
            check.name.removeprefix("demo/"),
            f"{check.value} {check.unit}".strip(),
            check.bar,
            holds,
        )
    return table


def write_results(
    path: Path,
    runs: Sequence[ArmRun],
    summaries: Sequence[ArmSummary],
    found: Sequence[Measure],
    origin: Provenance,
) -> None:
    """Everything that was measured, down to each request, as JSON."""
    arms: list[dict[str, Any]] = [
        {
            "summary": asdict(summary),
            "command": run.setup.shown_command(),
            "requests": [
                {
                    **asdict(result),
                    "ok": result.ok,
                    "ttft_s": result.ttft_s,
                    "tpot_s": result.tpot_s,
                }
                for result in run.results
            ],
            "transitions": run.transitions,
            "weights": None if run.weights is None else asdict(run.weights),
        }
        for run, summary in zip(runs, summaries, strict=True)
    ]
    content = {**asdict(origin), "measures": [asdict(measure) for measure in found], "arms": arms}
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE))
