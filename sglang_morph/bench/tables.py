"""The comparison as tables of text: what the report shows, in HTML or in Markdown."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_morph.bench.arm_run import CONTROL
from sglang_morph.bench.bootstrap import Estimate, estimate, paired_ratio
from sglang_morph.bench.results import Comparison

Table = list[list[str]]
"""Rows of cells, the header first."""


@dataclass(frozen=True, slots=True)
class Measure:
    key: str
    label: str
    scale: float = 1.0
    higher_is_better: bool | None = None
    """None: neither."""
    ratio: bool = False
    """Whether it is set in relation to the reference arm."""


MEASURES = (
    Measure("slo_attainment", "SLO attainment (%)", 100.0, True),
    Measure("goodput", "goodput (requests/s)", 1.0, True, ratio=True),
    Measure("p50_ttft_s", "TTFT P50 (s)", 1.0, False),
    Measure("p95_ttft_s", "TTFT P95 (s)", 1.0, False, ratio=True),
    Measure("p99_ttft_s", "TTFT P99 (s)", 1.0, False),
    Measure("p50_tpot_s", "TPOT P50 (ms)", 1000.0, False),
    Measure("p95_tpot_s", "TPOT P95 (ms)", 1000.0, False, ratio=True),
    Measure("max_gap_s", "longest gap (s)", 1.0, False),
    Measure("p95_queue_s", "queue time P95 (s)", 1.0, False),
    Measure("prefill_pace_s", "fastest prefills at rest (us a prompt token, P10)", 1e6),
    Measure("throughput", "output tokens/s", 1.0, True, ratio=True),
    Measure("failed", "failed requests", 1.0, False),
    Measure("retracted", "retractions", 1.0, False),
    Measure("peak_kv_tokens", "most KV tokens there were"),
    Measure("peak_kv_use", "peak KV use (%)", 100.0),
    Measure("waiting_share", "time with a queue (%)", 100.0),
    Measure("full_precision_token_share", "output tokens at full precision (%)", 100.0, True),
    Measure("full_precision_prompt_share", "prompt tokens computed at it (%)", 100.0, True),
    Measure("reused_lowered", "lower-precision prefix tokens reused", 1.0, False),
    Measure("transitions", "level changes"),
    Measure("effective_score", "effective score (attainment x quality)", 1.0, True),
    Measure("p99_lateness_s", "replayer's lateness P99 (ms)", 1000.0),
)


def block_values(found: Comparison, arm: str, workload: str, key: str) -> dict[int, list[float]]:
    """The values of one measure, by block."""
    by_block: dict[int, list[float]] = defaultdict(list)
    for block, values in found.values(arm, workload):
        value = values[key]
        if value is not None and math.isfinite(value):
            by_block[block].append(value)
    return dict(by_block)


def estimate_of(found: Comparison, arm: str, workload: str, key: str) -> Estimate | None:
    by_block = block_values(found, arm, workload, key)
    return estimate([value for block in by_block.values() for value in block])


def arms_with(found: Comparison, workload: str) -> list[str]:
    """The arms that were measured with it: a plan may give it to some only."""
    return [arm for arm in found.arms if found.records(arm, workload)]


def measures_table(found: Comparison, workload: str) -> Table:
    """A row per measure, a column per arm: medians and intervals over runs; the best is starred."""
    arms = arms_with(found, workload)
    rows = [["", *arms]]
    for measure in MEASURES:
        estimates = [estimate_of(found, arm, workload, measure.key) for arm in arms]
        if not any(estimates):
            continue
        best = _best(measure, estimates)
        cells = [
            _cell(item, measure.scale) + (" *" if item is not None and item.median == best else "")
            for item in estimates
        ]
        rows.append([measure.label, *cells])
    return rows


def _best(measure: Measure, estimates: Sequence[Estimate | None]) -> float | None:
    medians = [item.median for item in estimates if item is not None]
    if measure.higher_is_better is None or len(set(medians)) < 2:
        return None
    pick: Callable[[list[float]], float] = max if measure.higher_is_better else min
    return pick(medians)


def ratios_table(found: Comparison, workload: str) -> Table:
    """Each arm over the reference arm in the same block."""
    reference = found.plan.reference_arm
    others = [arm for arm in arms_with(found, workload) if arm != reference]
    rows = [[f"relative to {reference}", *others]]
    for measure in MEASURES:
        if not measure.ratio:
            continue
        base = block_values(found, reference, workload, measure.key)
        ratios = [
            paired_ratio(block_values(found, arm, workload, measure.key), base) for arm in others
        ]
        if any(ratios):
            rows.append([_unitless(measure.label), *(_cell(ratio, 1.0, "x") for ratio in ratios)])
    return rows if others else []


def _unitless(label: str) -> str:
    return label.partition(" (")[0]


def control_table(found: Comparison) -> Table:
    """The low-load control: nobody may have morphed. Its speed is that of an unloaded server."""
    rows = [
        [
            "low-load control",
            "runs",
            "level changes",
            "tokens at the resting level",
            "TTFT P50 (s)",
            "TPOT P50 (ms)",
            "passed",
        ]
    ]
    for arm in found.arms:
        records = [record for _, record in found.records(arm, CONTROL)]
        if not records:
            continue
        changes = sum(len(record.observed.transitions) for record in records)
        tokens = [record.observed.tokens_by_level for record in records]
        resting = sum(run.get(found.plan.arm(arm).level, 0) for run in tokens)
        total = sum(sum(run.values()) for run in tokens)
        passed = changes == 0 and resting == total > 0
        rows.append(
            [
                arm,
                str(len(records)),
                str(changes),
                f"{100 * resting / total:.1f}%" if total else "none came",
                _cell(estimate_of(found, arm, CONTROL, "p50_ttft_s"), 1.0),
                _cell(estimate_of(found, arm, CONTROL, "p50_tpot_s"), 1000.0),
                "yes" if passed else "NO",
            ]
        )
    return rows if len(rows) > 1 else []


def arms_table(found: Comparison) -> Table:
    """What each arm is, and the memory it had at full precision."""
    rows = [
        [
            "arm",
            "runs",
            "KV tokens at rest",
            "weights and KV (GiB)",
            "weights afterwards",
            "errors",
            "command",
        ]
    ]
    for arm in found.arms:
        runs = [run for run in found.runs if run.arm == arm]
        errors = [run.report["error"] for run in runs if run.report["error"]]
        checked = {run.report.get("weights_identical") for run in runs}
        weights = _weights_afterwards(checked, found.plan.arm(arm).morphs)
        memory, size = runs[0].report.get("memory") or {}, runs[0].total_bytes
        rows.append(
            [
                arm,
                str(len(runs)),
                _tokens(memory),
                "unknown" if size is None else f"{size / 2**30:.2f}",
                weights,
                "; ".join(errors) or "none",
                found.plan.arm(arm).command,
            ]
        )
    return rows


def _weights_afterwards(checked: set[bool | None], morphs: bool) -> str:
    if False in checked:
        return "CHANGED"
    if True in checked:
        return "identical"
    return "not compared" if morphs else "not moved"


def _tokens(memory: dict[str, dict[str, float]]) -> str:
    if morph := memory.get("morph"):
        return f"{morph['resting_tokens']:,}"
    sglang = memory.get("sglang") or {}
    return f"{sglang['token_capacity']:,}" if "token_capacity" in sglang else "unknown"


def transitions_table(found: Comparison, workload: str) -> Table:
    """Every level change of every run."""
    rows = [["arm", "block", "at (s)", "from", "to", "took (ms)", "pages lent", "reason"]]
    for arm in found.arms:
        for block, record in found.records(arm, workload):
            for change in record.observed.transitions:
                rows.append(
                    [
                        arm,
                        str(block),
                        f"{change['time'] - record.observed.started:.2f}",
                        str(change["from"]),
                        str(change["to"]),
                        f"{1000 * change['duration_s']:.1f}",
                        str(change["pages_lent"] - change["pages_withdrawn"]),
                        str(change["reason"]),
                    ]
                )
    return rows if len(rows) > 1 else []


def _cell(item: Estimate | None, scale: float, unit: str = "") -> str:
    if item is None:
        return ""
    text = _number(item.median * scale) + unit
    if item.low is None or item.high is None:
        return text
    return f"{text} [{_number(item.low * scale)}, {_number(item.high * scale)}]"


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) < 0.001:
        return "<0.001"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(table: Table) -> str:
    header, *rows = table
    ruler = ["---", *("---:" for _ in header[1:])]
    return "\n".join(
        "| " + " | ".join(_escape(c) for c in row) + " |" for row in [header, ruler, *rows]
    )


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")
