"""Reads the finished runs of a comparison, and the numbers that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import orjson

from sglang_morph.bench.arm_run import CONTROL, RUN
from sglang_morph.bench.comparison_run import PLAN, has_results, measured_slo
from sglang_morph.bench.exposure import (
    full_precision_share,
    prefilled_by_level,
    quality_score,
)
from sglang_morph.bench.plan import Arm, Plan, PlanError, decode_path
from sglang_morph.bench.prefill_pace import prefill_pace_s
from sglang_morph.bench.record import Record, has_record, kv_pressure, read_record
from sglang_morph.bench.schedule import ScheduledRun
from sglang_morph.bench.statistics import Slo, percentile

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One run: finished or, where arms take turns, as far as it has come."""

    block: int
    arm: str
    folder: Path
    report: dict[str, Any]
    """`run.json`."""
    records: dict[str, Record]
    """By workload; those not done yet and those after an `error` are missing."""

    @property
    def page_bytes(self) -> float:
        """Bytes of KV cache of one token; 0 where the server doesn't tell."""
        memory = self.report.get("memory") or {}
        if morph := memory.get("morph"):
            # Base pages include page 0, SGLang's padding sink.
            return morph["bytes"]["kv_base"] / (morph["base_tokens"] + 1)
        sglang = memory.get("sglang") or {}
        capacity = sglang.get("token_capacity")
        return _GIB * sglang["kvcache"] / capacity if capacity else 0.0

    @property
    def total_bytes(self) -> float | None:
        """Of weights and KV cache together, at level 0; None where the server doesn't tell.

        With what a backend needs beside them on the device: scratch memory and padding.
        """
        memory = self.report.get("memory") or {}
        morph, sglang = memory.get("morph"), memory.get("sglang") or {}
        if "weight" not in sglang:
            return None
        if morph is None:
            return float(_GIB * (sglang["weight"] + sglang["kvcache"]))
        owned = morph["bytes"]
        extra = owned.get("unused", 0) + owned.get("detail", {}).get("scratch", 0)
        return float(owned["full_weights"] + owned["kv_base"] + extra + self.fixed_weight_bytes)

    @property
    def fixed_weight_bytes(self) -> float:
        """Bytes of weights that a morphing server's samples leave out, since they never move."""
        memory = self.report.get("memory") or {}
        morph, sglang = memory.get("morph"), memory.get("sglang") or {}
        if morph is None or "weight" not in sglang:
            return 0.0
        return max(0.0, _GIB * sglang["weight"] - morph["bytes"]["full_weights"])


@dataclass(frozen=True, slots=True)
class Comparison:
    plan: Plan
    description: dict[str, Any]
    """`plan.json`."""
    slo: Slo
    """As measured: with the base time between tokens from the control, where the plan has one."""
    runs: list[ArmRun]
    planned: int
    """Runs of the whole schedule."""
    _values: dict[tuple[str, str], list[tuple[int, dict[str, float | None]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By arm and workload: a report asks for one of them at a time."""

    @property
    def arms(self) -> list[str]:
        """Arms with a run, in the plan's order."""
        return [arm.name for arm in self.plan.arms if any(r.arm == arm.name for r in self.runs)]

    @property
    def workloads(self) -> list[str]:
        """Without the control."""
        return [w["name"] for w in self.description["workloads"] if w["name"] != CONTROL]

    def records(self, arm: str, workload: str) -> list[tuple[int, Record]]:
        """Block and record of each run of `arm` that has the workload."""
        return [
            (run.block, run.records[workload])
            for run in self.runs
            if run.arm == arm and workload in run.records
        ]

    def values(self, arm: str, workload: str) -> list[tuple[int, dict[str, float | None]]]:
        """Block and `values` of each run of `arm` that has the workload."""
        key = arm, workload
        if key not in self._values:
            self._values[key] = [
                (block, values(record, self.slo, self.plan.arm(arm)))
                for block, record in self.records(arm, workload)
            ]
        return self._values[key]


def load_comparison(folder: Path) -> Comparison:
    """Raises `PlanError` for a folder without finished runs."""
    try:
        description = orjson.loads((folder / PLAN).read_bytes())
    except OSError as error:
        raise PlanError(f"{folder} has no {PLAN}; run `sglang-morph bench ab` first") from error
    plan = msgspec.convert(description["plan"], Plan, dec_hook=decode_path)
    schedule = msgspec.convert(description["schedule"], list[ScheduledRun])
    names = [workload["name"] for workload in description["workloads"]]
    runs = [
        _load_run(folder / "runs" / run.folder, run, names)
        for run in schedule
        if has_results(plan, folder / "runs" / run.folder)
    ]
    if not runs:
        raise PlanError(f"{folder} has no finished run yet; run `sglang-morph bench ab` first")
    return Comparison(plan, description, measured_slo(plan, folder, schedule), runs, len(schedule))


def _load_run(folder: Path, run: ScheduledRun, names: Sequence[str]) -> ArmRun:
    records = {name: read_record(folder, name) for name in names if has_record(folder, name)}
    return ArmRun(run.block, run.arm, folder, orjson.loads((folder / RUN).read_bytes()), records)


def values(record: Record, slo: Slo, arm: Arm) -> dict[str, float | None]:
    """What is compared of one replay. Times in s, rates per s; None where there is no number."""
    row, done = record.row, [outcome for outcome in record.outcomes if outcome.ok]
    ttft = [outcome.ttft_s for outcome in done if outcome.ttft_s is not None]
    tpot = [outcome.tpot_s for outcome in done if outcome.tpot_s is not None]
    gaps = [outcome.max_gap_s for outcome in done if outcome.max_gap_s is not None]
    queue = [outcome.queue_s for outcome in done if outcome.queue_s is not None]
    met = sum(slo.met(outcome) for outcome in record.outcomes)
    attainment = met / len(record.outcomes)
    tokens = record.observed.tokens_by_level
    quality = None
    if arm.quality and arm.real_weights:
        quality = quality_score(tokens, {int(level): q for level, q in arm.quality.items()})
    pressure = kv_pressure(record.observed.samples, record.observed.started + row["duration"])
    return {
        "slo_attainment": attainment,
        "goodput": met / row["duration"],
        "p50_ttft_s": _at(ttft, 50),
        "p95_ttft_s": _at(ttft, 95),
        "p99_ttft_s": _at(ttft, 99),
        "p50_tpot_s": _at(tpot, 50),
        "p95_tpot_s": _at(tpot, 95),
        "max_gap_s": max(gaps, default=None),
        "p95_queue_s": _at(queue, 95),
        "prefill_pace_s": prefill_pace_s(record.outcomes, arm.level),
        "throughput": row["output_throughput"],
        "failed": float(row["failed"]),
        "retracted": float(record.observed.retracted),
        "peak_kv_tokens": max(
            (float(sample.capacity) for sample in record.observed.samples), default=None
        ),
        "peak_kv_use": pressure["peak_use"],
        "waiting_share": pressure["share_waiting"],
        "full_precision_token_share": 0.0 if arm.quantized else full_precision_share(tokens),
        "full_precision_prompt_share": 0.0
        if arm.quantized
        else full_precision_share(prefilled_by_level(record.outcomes)),
        "reused_lowered": float(row["reused_lowered_tokens"]),
        "transitions": float(len(record.observed.transitions)),
        "effective_score": None if quality is None else attainment * quality,
        "p99_lateness_s": _at(
            [o.lateness_s for o in record.outcomes if o.lateness_s is not None], 99
        ),
    }


def _at(seconds: Sequence[float], percent: float) -> float | None:
    return percentile(seconds, percent) if seconds else None
