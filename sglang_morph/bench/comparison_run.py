"""Carries a plan out: run after run, each in a folder of its own, resumable after an interruption.

DIR/plan.json       what is being run, with the schedule and digests of the workloads
DIR/runs/NAME/      one run; finished once it has a file `done`
DIR/servers/NAME/   logs of a server that several runs share, where servers are started together
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson

from sglang_morph.bench.arm_run import CONTROL, RUN, ArmServer, Progress, run_arm
from sglang_morph.bench.card import Card, real_gpu_gib
from sglang_morph.bench.plan import Plan, PlanError, Steady
from sglang_morph.bench.prompts import default_text, text_tokens
from sglang_morph.bench.record import has_record, read_record
from sglang_morph.bench.schedule import ScheduledRun, make_schedule, make_slots
from sglang_morph.bench.statistics import Slo, percentile
from sglang_morph.bench.workload import Workload, make_workload, steady_workload
from sglang_morph.demo.provenance import Provenance

DONE = "done"
PLAN = "plan.json"
_WARMUP = "warm-up"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan with all that is made before the first server starts."""

    plan: Plan
    card: Card | None
    tokens: list[int]
    """The text that prompts are cut from."""
    warmup: Workload
    workloads: list[Workload]
    """The low-load control first, where the plan has one."""
    schedule: list[ScheduledRun]

    def workloads_of(self, arm: str) -> list[Workload]:
        return [w for w in self.workloads if arm in self.plan.arms_of(w.name)]

    def describe(self) -> dict[str, Any]:
        """Equal for equal work: what a folder is resumed by."""
        return {
            "plan": msgspec.to_builtins(self.plan, enc_hook=str),
            "card": None if self.card is None else self.card.as_dict(),
            "workloads": [
                {
                    "name": workload.name,
                    "requests": len(workload.requests),
                    "duration_s": workload.duration_s,
                    "digest": workload.digest,
                    "origin": workload.origin,
                }
                for workload in self.workloads
            ],
            "schedule": msgspec.to_builtins(self.schedule),
        }


def plan_tokens(plan: Plan) -> list[int]:
    """The text that prompts are cut from, as tokens."""
    text = default_text() if plan.text is None else plan.text.read_text(encoding="utf-8")
    return text_tokens(plan.model, text)


def prepare(plan: Plan, time_budget_s: float | None) -> Prepared:
    """Make prompts and schedule. Raises `PlanError`, `TraceError`, `WindowError`, `PromptError`,
    `CardError`.
    """
    tokens = plan_tokens(plan)
    card = None
    if plan.gpu_memory_gib is not None:
        card = Card(plan.gpu_memory_gib, real_gpu_gib(), plan.gpu_static_fraction)
    workloads = [make_workload(spec, tokens, plan.seed) for spec in plan.workloads]
    if plan.control is not None:
        workloads.insert(0, _steady(CONTROL, tokens, plan.control, plan.seed + 1))
    warmup = _steady(_WARMUP, tokens, plan.warmup, plan.seed + 2)
    names = [arm.name for arm in plan.arms]
    if plan.servers == "together" and time_budget_s is not None:
        raise PlanError(
            "servers started together have no slots; give --stop-after instead of --time-budget"
        )
    if time_budget_s is None:
        schedule = make_schedule(names, plan.repetitions)
    else:
        run_s = expected_run_s(plan, warmup, workloads)
        schedule = make_slots(
            names, plan.reference_arm, plan.repetitions, dict.fromkeys(names, run_s), time_budget_s
        )
    return Prepared(plan, card, tokens, warmup, workloads, schedule)


def _steady(name: str, tokens: Sequence[int], load: Steady, seed: int) -> Workload:
    return steady_workload(name, tokens, seed=seed, **msgspec.structs.asdict(load))


def expected_run_s(plan: Plan, warmup: Workload, workloads: Sequence[Workload]) -> float:
    """A run's time, were every answer to come at once: arrivals, start, a pause between them."""
    pause_s = 5.0
    parts = [warmup, *workloads]
    return plan.expected_start_s + sum(part.duration_s + pause_s for part in parts)


def open_folder(folder: Path, prepared: Prepared) -> None:
    """Make `folder` this comparison's, or check that it is. Raises `PlanError`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / PLAN
    description = orjson.dumps(
        prepared.describe(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS
    )
    if not file.exists():
        file.write_bytes(description)
    elif file.read_bytes() != description:
        raise PlanError(
            f"{folder} holds runs of another plan (or time budget); give another --output"
        )


def pending_runs(folder: Path, runs: Sequence[ScheduledRun]) -> list[ScheduledRun]:
    """Those not finished yet, in order."""
    return [run for run in runs if not (folder / "runs" / run.folder / DONE).exists()]


def has_results(plan: Plan, folder: Path) -> bool:
    """Whether what a run has measured counts: once it is finished or, where arms take turns, at
    any time, since then all arms are as far."""
    return (folder / (DONE if plan.servers == "fresh" else RUN)).exists()


def carry_out(
    prepared: Prepared,
    runs: Sequence[ScheduledRun],
    output: Path,
    origin: Provenance,
    make_progress: Callable[[ScheduledRun], Progress],
    stop_after_s: float | None = None,
) -> list[ScheduledRun]:
    """Do `runs`, and return those that were left because the time was up.

    With `stop_after_s` a run is only begun if it should end before that; the first always is.
    """
    begin = time.monotonic()
    longest_s = expected_run_s(prepared.plan, prepared.warmup, prepared.workloads)
    for position, run in enumerate(runs):
        passed = time.monotonic() - begin
        if stop_after_s is not None and position and passed + longest_s > stop_after_s:
            return list(runs[position:])
        run_begin = time.monotonic()
        _one_run(prepared, run, output, origin, make_progress(run))
        longest_s = max(longest_s, time.monotonic() - run_begin)
    return []


def _one_run(
    prepared: Prepared, run: ScheduledRun, output: Path, origin: Provenance, progress: Progress
) -> None:
    plan = prepared.plan
    folder = output / "runs" / run.folder
    if folder.exists():
        shutil.rmtree(folder)  # Begun once and interrupted: half a run is no run.
    folder.mkdir(parents=True)
    server = ArmServer(plan, plan.arm(run.arm), prepared.card, prepared.warmup, folder)
    slo = measured_slo(plan, output, prepared.schedule)
    report = run_arm(server, slo, prepared.workloads_of(run.arm), origin, progress)
    (folder / DONE).write_text(report.error or "")


def measured_slo(plan: Plan, output: Path, schedule: Sequence[ScheduledRun]) -> Slo:
    """The plan's SLO, with the base time between tokens from the reference arm's first control.

    Rows of the runs before that have no limit on gaps; the report computes all of them anew.
    """
    if plan.slo.base_tbt_s is not None or plan.control is None:
        return plan.slo
    for run in schedule:
        folder = output / "runs" / run.folder
        is_reference = run.arm == plan.reference_arm and has_results(plan, folder)
        if is_reference and has_record(folder, CONTROL):
            outcomes = read_record(folder, CONTROL).outcomes
            itls = [itl for outcome in outcomes if outcome.ok for itl in outcome.itls_s]
            if itls:
                return msgspec.structs.replace(plan.slo, base_tbt_s=percentile(itls, 50.0))
    return plan.slo
