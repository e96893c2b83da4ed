"""The check of the simulation against real runs, on runs the simulation itself made."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.simulation_error import POLICIES, RealRun, ab_runs, compare, demo_runs, simulate
from sglang_morph.bench.traces import TraceRequest
from sglang_morph.policy_cli.profile import load_profile
from sglang_morph.policy_cli.simulation import Outcome
from sglang_morph.policy_cli.tables import Slo, summarize

BURST = [TraceRequest(0.2 * i, 60 + 5 * i, 40 + i) for i in range(30)]
PROFILE = load_profile("smollm2-cpu")


def ttft(outcome: Outcome, slower: float) -> list[float]:
    """In the order of the requests, `slower` times as long as simulated."""
    return [slower * s.ttft_s for s in sorted(outcome.served, key=lambda served: served.at_s)]


def demo_results(slower: float) -> dict[str, Any]:
    """As the demo writes them."""
    arms = []
    for backend in ("static", "layer_swap"):
        outcome = simulate(PROFILE, backend, BURST)
        rows = [
            {
                "sent_s": r.at_s,
                "prompt_tokens": r.input_tokens,
                "output_tokens": r.output_tokens,
                "ttft_s": first_s,
                "ok": True,
            }
            for r, first_s in zip(BURST, ttft(outcome, slower), strict=True)
        ]
        summary = asdict(summarize(backend, outcome, Slo(2.0)))
        summary |= {"backend": backend, "transitions": len(outcome.transitions)}
        arms.append({"summary": summary, "requests": rows[::-1]})
    return {"arms": arms}


def write_demo(folder: Path, results: dict[str, Any]) -> Path:
    file = folder / "demo.json"
    file.write_bytes(orjson.dumps(results))
    return file


@pytest.mark.parametrize(("slower", "error"), [(1.0, 0.0), (1.25, 20.0)])
def test_the_error_is_relative_to_what_was_measured(
    slower: float, error: float, tmp_path: Path
) -> None:
    file = write_demo(tmp_path, demo_results(slower))
    table, found = compare(demo_runs(file), PROFILE)
    assert found == pytest.approx([error, error], abs=0.01)
    assert table.row_count == 2


def test_a_run_with_failures_is_refused(tmp_path: Path) -> None:
    results = demo_results(1.0)
    results["arms"][0]["requests"][3]["ok"] = False
    with pytest.raises(ValueError, match="failed"):
        list(demo_runs(write_demo(tmp_path, results)))


def write_ab(folder: Path, failed: int = 0) -> None:
    """As `benchmarks.record_ab` writes them: two arms, a control and a trace each."""
    lines, requests = [], []
    for arm in ("static", "int8"):
        outcome = simulate(PROFILE, arm, BURST)
        for workload in ("low-load-control", "code"):
            lines.append(
                {
                    "arm": arm, "block": 0, "dataset_name": workload, "failed": failed,
                    "retracted_by_server": outcome.retractions, "transitions": 0,
                }
            )  # fmt: skip
            for r, first_s in zip(BURST, ttft(outcome, 1.0), strict=True):
                requests.append(
                    {
                        "arm": arm, "block": 0, "workload": workload, "at_s": r.at_s,
                        "prompt_tokens": r.input_tokens, "output_tokens": r.output_tokens,
                        "arrivals_s": [r.at_s + first_s],
                    }
                )  # fmt: skip
    (folder / "rows.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    pq.write_table(pa.Table.from_pylist(requests), folder / "requests.parquet")


def test_every_trace_of_a_comparison_is_simulated_but_not_its_control(tmp_path: Path) -> None:
    write_ab(tmp_path)
    runs: list[RealRun] = list(ab_runs(tmp_path))
    assert [(run.arm, run.name, len(run.requests)) for run in runs] == [
        ("static", "code", 30),
        ("int8", "code", 30),
    ]
    _, errors = compare(iter(runs), PROFILE)
    assert errors == pytest.approx([0.0, 0.0], abs=0.01)
    write_ab(tmp_path, failed=1)
    with pytest.raises(ValueError, match="failed"):
        list(ab_runs(tmp_path))


def test_an_arm_at_a_level_of_its_own_stays_there() -> None:
    outcome = simulate(PROFILE, "int8", BURST)
    assert not outcome.transitions and outcome.lowered_tokens == outcome.tokens
    assert set(POLICIES) == {"static", "layer_swap", "int8"}
