"""Runs the search for each arm's capacity: one server an arm, flushed between rates.

DIR/sweep/ARM/             log, records of every rate tried, `capacity.json` once done
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import msgspec

from sglang_morph.bench.arm_run import ArmServer, Progress
from sglang_morph.bench.comparison_run import Prepared, measured_slo
from sglang_morph.bench.plan import PlanError, Sweep
from sglang_morph.bench.record import write_record
from sglang_morph.bench.sweep import RESULT, Capacity, Try, search, write_capacity
from sglang_morph.bench.workload import make_workload
from sglang_morph.demo.provenance import Provenance


def sweep_arms(
    prepared: Prepared,
    output: Path,
    origin: Provenance,
    make_progress: Callable[[str], Progress],
) -> None:
    """Search for every arm not done yet. Raises `PlanError`, `ServerFailed`, `NotSettled`."""
    sweep = prepared.plan.sweep
    if sweep is None:
        raise PlanError("the plan has no [sweep]; add one with workload, low and high")
    for arm in prepared.plan.arms:
        folder = output / "sweep" / arm.name
        if not (folder / RESULT).exists():
            found = _sweep_arm(prepared, sweep, arm.name, output, make_progress(arm.name))
            write_capacity(folder, msgspec.structs.replace(found, origin=asdict(origin)))


def _sweep_arm(
    prepared: Prepared, sweep: Sweep, arm: str, output: Path, progress: Progress
) -> Capacity:
    plan = prepared.plan
    folder = output / "sweep" / arm
    if folder.exists():
        shutil.rmtree(folder)  # Interrupted: rates tried on two servers don't make one search.
    folder.mkdir(parents=True)
    slo = measured_slo(plan, output, prepared.schedule)
    spec = next(spec for spec in plan.workloads if spec.name == sweep.workload)
    server = ArmServer(plan, plan.arm(arm), prepared.card, prepared.warmup, folder)
    with server.running(progress) as (process, measured):
        server.pin(measured)
        measured.send(server.warmup)

        def measure(rate: float) -> Try:
            name = f"{spec.name}@{rate:.3f}"
            at_rate = msgspec.structs.replace(spec, name=name, rate=rate, factor=None)
            workload = make_workload(at_rate, prepared.tokens, plan.seed)
            measured.settle()
            progress.replaying(name, len(workload.requests))
            record = measured.measure(workload, slo, arm, progress.finished)
            write_record(folder, name, record)
            process.check_alive()
            return Try(rate, record.row["slo_attainment"], record.row["goodput"])

        return search(arm, measure, sweep.low, sweep.high, sweep.steps, sweep.attainment)
