"""Simulate a run of the demo that really happened, and compare times to first token.

    python -m benchmarks.simulation_error demo/results.json [--record]

The run's own arrivals and token counts go into the simulation, with a profile of the same server.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.acceptance import ACCEPTANCE, Row, upsert
from sglang_morph.bench.traces import TraceRequest
from sglang_morph.demo.provenance import provenance
from sglang_morph.policy_cli.profile import ServerProfile, load_profile
from sglang_morph.policy_cli.simulation import Outcome, Simulation
from sglang_morph.policy_cli.spec import parse_spec

BAR_PCT = 25.0
POLICIES = {"static": "full", "layer_swap": "threshold"}
"""What each arm of the demo runs."""


def requests_of(arm: dict[str, Any]) -> list[TraceRequest]:
    """The arm's requests as a trace. Raises ValueError if one of them failed."""
    rows = sorted(arm["requests"], key=lambda row: row["sent_s"])
    if not all(row["ok"] for row in rows):
        raise ValueError("a request of this run failed; take a run in which all were answered")
    return [TraceRequest(r["sent_s"], r["prompt_tokens"], r["output_tokens"]) for r in rows]


def simulate(profile: ServerProfile, policy: str, requests: list[TraceRequest]) -> Outcome:
    spec = parse_spec(policy)
    return Simulation(profile, spec.create(profile.top_level), requests).run()


def compare(results: dict[str, Any], profile: ServerProfile) -> tuple[Table, float]:
    """The table, and the larger error of P95 TTFT in percent of the measured one."""
    table = Table(title="Simulated against measured")
    for column in ("arm", "TTFT P50, s", "TTFT P95, s", "error of P95", "retracted", "moves"):
        table.add_column(column, justify="right")
    errors = []
    for arm in results["arms"]:
        summary = arm["summary"]
        requests = requests_of(arm)
        outcome = simulate(profile, POLICIES[summary["backend"]], requests)
        predicted = [served.ttft_s for served in outcome.served]
        p50, p95 = (float(np.percentile(predicted, q)) for q in (50, 95))
        errors.append(100 * abs(p95 - summary["ttft_p95"]) / summary["ttft_p95"])
        table.add_row(
            summary["backend"],
            f"{p50:.2f} / {summary['ttft_p50']:.2f}",
            f"{p95:.2f} / {summary['ttft_p95']:.2f}",
            f"{errors[-1]:.0f}%",
            f"{outcome.retractions} / {summary['retractions']}",
            f"{len(outcome.transitions)} / {summary['transitions']}",
        )
    return table, max(errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="results.json of the demo")
    parser.add_argument("--profile", default="smollm2-cpu")
    parser.add_argument("--record", action="store_true", help="write the number to acceptance.json")
    arguments = parser.parse_args()
    results = orjson.loads(arguments.results.read_bytes())
    table, error = compare(results, load_profile(arguments.profile))
    Console().print(table)
    row = Row(
        name="controller/simulation_error_pct",
        value=round(error, 1),
        unit="%",
        bar=f"<= {BAR_PCT:g}",
        holds=error <= BAR_PCT,
        **asdict(
            provenance(shlex.join(["python", "-m", "benchmarks.simulation_error", *sys.argv[1:]]))
        ),
    )
    if arguments.record:
        upsert([row], ACCEPTANCE)
    return 0 if row.holds else 1


if __name__ == "__main__":
    sys.exit(main())
