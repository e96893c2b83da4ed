"""Simulate runs that really happened, and compare times to first token.

    python -m benchmarks.simulation_error benchmarks/results/demo.json [--record]
    python -m benchmarks.simulation_error benchmarks/results/ab_cpu

The first is a run of the demo, the second what `benchmarks.record_ab` kept of a comparison. Each
run's own arrivals and token counts go into the simulation, with a profile of the same server.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from benchmarks.acceptance import ACCEPTANCE, Row, upsert
from benchmarks.record_ab import REQUESTS, ROWS
from sglang_morph.bench.arm_run import CONTROL
from sglang_morph.bench.traces import TraceRequest
from sglang_morph.controller.manual import ManualPolicy
from sglang_morph.controller.policy import Policy
from sglang_morph.demo.provenance import provenance
from sglang_morph.policy_cli.profile import ServerProfile, load_profile
from sglang_morph.policy_cli.simulation import Outcome, Simulation
from sglang_morph.policy_cli.spec import parse_spec

BAR_PCT = 25.0


def _resting(level: int) -> Callable[[ServerProfile], tuple[Policy, int]]:
    def create(profile: ServerProfile) -> tuple[Policy, int]:
        policy = ManualPolicy(parse_spec("manual").options, profile.top_level)
        policy.set_level(level)
        return policy, level

    return create


def _threshold(profile: ServerProfile) -> tuple[Policy, int]:
    return parse_spec("threshold").create(profile.top_level), 0


POLICIES = {"static": _resting(0), "layer_swap": _threshold, "int8": _resting(3)}
"""The arms of the demo and of `benchmarks/plans/cpu_smollm2.toml`: policy, and level at first."""


@dataclass(frozen=True, slots=True)
class RealRun:
    """A run that happened. Seconds."""

    name: str
    arm: str
    requests: list[TraceRequest]
    ttft_s: list[float]
    retractions: int
    transitions: int


def demo_runs(file: Path) -> Iterator[RealRun]:
    """Raises ValueError if a request failed."""
    for arm in orjson.loads(file.read_bytes())["arms"]:
        summary = arm["summary"]
        rows = sorted(arm["requests"], key=lambda row: row["sent_s"])
        if not all(row["ok"] for row in rows):
            raise ValueError("a request of this run failed; take a run in which all were answered")
        yield RealRun(
            name="demo",
            arm=summary["backend"],
            requests=[
                TraceRequest(r["sent_s"], r["prompt_tokens"], r["output_tokens"]) for r in rows
            ],
            ttft_s=[row["ttft_s"] for row in rows],
            retractions=summary["retractions"],
            transitions=summary["transitions"],
        )


def ab_runs(folder: Path) -> Iterator[RealRun]:
    """The workloads of every run but the low-load control. Raises ValueError as `demo_runs`."""
    requests = pq.read_table(folder / REQUESTS).to_pylist()
    for line in (folder / ROWS).read_bytes().splitlines():
        row = orjson.loads(line)
        key = row["arm"], row["block"], row["dataset_name"]
        if row["dataset_name"] == CONTROL:
            continue
        mine = [r for r in requests if (r["arm"], r["block"], r["workload"]) == key]
        if row["failed"]:
            raise ValueError(f"a request of {key} failed; take a run in which all were answered")
        yield RealRun(
            name=row["dataset_name"],
            arm=row["arm"],
            requests=[
                TraceRequest(r["at_s"], r["prompt_tokens"], r["output_tokens"]) for r in mine
            ],
            ttft_s=[r["arrivals_s"][0] - r["at_s"] for r in mine],
            retractions=row["retracted_by_server"],
            transitions=row["transitions"],
        )


def simulate(profile: ServerProfile, arm: str, requests: list[TraceRequest]) -> Outcome:
    policy, level = POLICIES[arm](profile)
    return Simulation(profile, policy, requests, level=level).run()


def compare(runs: Iterator[RealRun], profile: ServerProfile) -> tuple[Table, list[float]]:
    """The table, and the runs' errors of P95 TTFT in percent of the measured one."""
    table = Table(title="Simulated / measured")
    for column in (
        "run",
        "arm",
        "TTFT P50, s",
        "TTFT P95, s",
        "error of P95",
        "retracted",
        "moves",
    ):
        table.add_column(column, justify="right")
    errors = []
    for run in runs:
        outcome = simulate(profile, run.arm, run.requests)
        predicted = _percentiles([served.ttft_s for served in outcome.served])
        measured = _percentiles(run.ttft_s)
        errors.append(100 * (predicted[1] / measured[1] - 1))
        table.add_row(
            run.name,
            run.arm,
            f"{predicted[0]:.2f} / {measured[0]:.2f}",
            f"{predicted[1]:.2f} / {measured[1]:.2f}",
            f"{errors[-1]:+.0f}%",
            f"{outcome.retractions} / {run.retractions}",
            f"{len(outcome.transitions)} / {run.transitions}",
        )
    return table, [abs(error) for error in errors]


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    p50, p95 = np.percentile(seconds, (50, 95))
    return float(p50), float(p95)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="demo.json, or a folder of record_ab")
    parser.add_argument("--profile", default="smollm2-cpu")
    parser.add_argument("--record", action="store_true", help="write the number to acceptance.json")
    arguments = parser.parse_args()
    results = arguments.results
    runs = ab_runs(results) if results.is_dir() else demo_runs(results)
    table, errors = compare(runs, load_profile(arguments.profile))
    Console().print(table)
    error = max(errors)
    command = shlex.join(["python", "-m", "benchmarks.simulation_error", *sys.argv[1:]])
    row = Row(
        name="controller.simulation_error_pct" + (".traces" if results.is_dir() else ""),
        value=round(error, 1),
        unit=f"%, the worst of {len(errors)} runs; median {statistics.median(errors):.1f}",
        bar=f"<= {BAR_PCT:g}",
        holds=error <= BAR_PCT,
        raw=str(results),
        **asdict(provenance(command)),
    )
    if arguments.record:
        upsert([row], ACCEPTANCE)
    return 0 if row.holds else 1


if __name__ == "__main__":
    sys.exit(main())
