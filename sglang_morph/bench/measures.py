"""The numbers of a comparison that the project keeps, one name each."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import orjson

from sglang_morph.bench.results import Comparison
from sglang_morph.bench.sweep import Capacity
from sglang_morph.bench.tables import estimate_of
from sglang_morph.demo.report import Measure

_KEPT = (
    ("p95_ttft_s", "s"),
    ("slo_attainment", ""),
    ("goodput", "requests/s"),
    ("throughput", "tokens/s"),
    ("full_precision_token_share", ""),
)


def measures(found: Comparison) -> list[Measure]:
    """Of all workloads and arms."""
    return [
        measure
        for workload in found.workloads
        for arm in found.arms
        for measure in measures_of(found, workload, arm)
    ]


def measures_of(found: Comparison, workload: str, arm: str) -> list[Measure]:
    """Medians over runs, as `ab.WORKLOAD.ARM.what`; none has a bar."""
    return [
        Measure(f"ab.{workload}.{arm}.{key}", round(item.median, 4), unit)
        for key, unit in _KEPT
        if (item := estimate_of(found, arm, workload, key)) is not None
    ]


AT_LEAST = "requests/s or more"
"""Unit of a capacity that is only known from below: no rate that was tried failed."""
LESS_THAN = "requests/s, and less"
"""Unit of a capacity that is only known from above: every rate that was tried failed."""


def capacity_measure(capacity: Capacity) -> Measure:
    """The highest rate kept; the lowest one tried where none was."""
    name = f"ab.{capacity.workload}.{capacity.arm}.capacity_rps"
    if capacity.sustained is None:
        return Measure(name, round(min(t.rate for t in capacity.tries), 3), LESS_THAN)
    unit = "requests/s" if capacity.failed is not None else AT_LEAST
    return Measure(name, round(capacity.sustained, 3), unit)


def write_measures(path: Path, found: Comparison, capacities: list[Capacity]) -> None:
    """As JSON, with where they come from."""
    kept = [*measures(found), *(capacity_measure(capacity) for capacity in capacities)]
    content = {
        **found.runs[0].report["origin"],
        "measures": [asdict(measure) for measure in kept],
    }
    path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
