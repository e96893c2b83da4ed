"""Recording a comparison, on one whose runs are made by hand."""

from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from benchmarks.acceptance import load
from benchmarks.record_ab import record_ab
from sglang_morph.bench.arm_run import RUN
from sglang_morph.bench.comparison_run import DONE, PLAN
from sglang_morph.bench.outcome import Outcome
from sglang_morph.bench.plan import PlanError
from sglang_morph.bench.record import Observed, Record, write_record
from sglang_morph.bench.replay import Replay
from sglang_morph.bench.statistics import Slo, replay_row
from sglang_morph.bench.sweep import Capacity, Try, search_folder, try_name, write_capacity
from sglang_morph.bench.workload import PlannedRequest, Workload

ORIGIN = {
    "command": "sglang-morph bench ab --plan plan.toml --output runs",
    "commit": "abc123",
    "date": "2030-01-01T00:00:00+00:00",
    "hardware": "a CPU",
}
WORKLOAD = Workload("code", [PlannedRequest(0.0, [1, 2], 2)] * 2, 2.0, {"trace": "t.csv"})
ORIGINS = {
    "trace": "t.csv", "format": "azure", "window_start_s": 0.0, "factor": 1.0, "seed": 0,
    "scaling": "thin", "token_factor": 1.0, "cut_to_limit": 0, "skipped": {},
}  # fmt: skip


def outcome(index: int, first_s: float) -> Outcome:
    return Outcome(
        index, 0.0, 2, 2, sent_s=0.0, prompt_tokens=2, output_tokens=2, text="secret",
        arrivals_s=[first_s, first_s + 0.1], arrival_tokens=[1, 1],
    )  # fmt: skip


def record(first_s: float) -> Record:
    outcomes = [outcome(0, first_s), outcome(1, first_s)]
    row = replay_row(Replay(outcomes, 0.0, 4.0), WORKLOAD, Slo())
    row["dataset_name"] = "code"
    row["server_info"] = {"model_path": "/a/path"}
    return Record(row, outcomes, Observed(0.0, [], [], 0, {0: 4}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two arms, one run each."""
    arms = [{"name": name, "command": "python x"} for name in ("slow", "fast")]
    description = {
        "plan": {
            "name": "p", "model": "m", "arms": arms,
            "workloads": [{"name": "code", "trace": "t.csv"}],
            "sweeps": [{"workload": "code", "low": 1, "high": 8}],
        },
        "card": None,
        "workloads": [
            {"name": "code", "requests": 2, "duration_s": 2.0, "digest": "d", "origin": ORIGINS}
        ],
        "schedule": [{"block": 0, "arm": arm["name"], "repetition": 0} for arm in arms],
    }  # fmt: skip
    root = tmp_path / "runs-of-a-plan"
    root.mkdir()
    (root / PLAN).write_bytes(orjson.dumps(description))
    for arm, first_s in (("slow", 3.0), ("fast", 0.5)):
        run = root / "runs" / f"block00-{arm}-0"
        run.mkdir(parents=True)
        write_record(run, "code", record(first_s))
        origin = dict(ORIGIN, command=f"{ORIGIN['command']} --arm {arm}")
        report = {"arm": arm, "origin": origin, "error": None, "memory": {}}
        (run / RUN).write_bytes(orjson.dumps(report))
        (run / DONE).touch()
    sweep = dict(ORIGIN, command="sglang-morph bench sweep --plan plan.toml --output runs")
    tried = search_folder(root, "code", "fast")
    write_capacity(tried, Capacity("fast", "code", 0.9, [Try(2.0, 1.0, 2.0)], True, sweep))
    write_record(tried, try_name("code", 2.0), record(0.25))
    return root


def test_every_number_gets_a_row_with_its_origin(folder: Path, tmp_path: Path) -> None:
    acceptance = tmp_path / "benchmarks" / "results" / "acceptance.json"
    record_ab(folder, "ab_cpu", acceptance)
    rows = {row.name: row for row in load(acceptance)}
    assert rows["ab.code.slow.p95_ttft_s"].value == pytest.approx(3.0)
    assert rows["ab.code.slow.slo_attainment"].value == 0
    assert rows["ab.code.fast.slo_attainment"].value == 1
    assert rows["ab.code.fast.full_precision_token_share"].value == 1
    for arm in ("slow", "fast"):
        assert rows[f"ab.code.{arm}.throughput"].command == f"{ORIGIN['command']} --arm {arm}"
    assert rows["ab.code.fast.capacity_rps"].value == 2.0
    assert "bench sweep" in rows["ab.code.fast.capacity_rps"].command
    assert {row.raw for row in rows.values()} == {"benchmarks/results/ab_cpu"}


def test_the_raw_data_is_beside_it_without_texts_and_paths(folder: Path, tmp_path: Path) -> None:
    acceptance = tmp_path / "benchmarks" / "results" / "acceptance.json"
    for _ in range(2):  # a second time replaces the first
        record_ab(folder, "ab_cpu", acceptance)
    raw = acceptance.parent / "ab_cpu"
    lines = [orjson.loads(line) for line in (raw / "rows.jsonl").read_bytes().splitlines()]
    assert [line["arm"] for line in lines] == ["slow", "fast"]
    requests = pq.read_table(raw / "requests.parquet").to_pylist()
    assert [(r["arm"], r["workload"], r["arrivals_s"][0]) for r in requests] == [
        *[("slow", "code", 3.0)] * 2,
        *[("fast", "code", 0.5)] * 2,
    ]
    assert "text" not in requests[0]
    assert "| fast |" in (raw / "report.md").read_text()
    assert not any(b"/a/path" in file.read_bytes() for file in raw.iterdir())


def test_rates_that_were_tried_are_kept_as_runs_are(folder: Path, tmp_path: Path) -> None:
    acceptance = tmp_path / "benchmarks" / "results" / "acceptance.json"
    record_ab(folder, "ab_cpu", acceptance)
    raw = acceptance.parent / "ab_cpu"
    (found,) = map(orjson.loads, (raw / "sweep.jsonl").read_bytes().splitlines())
    assert found["arm"] == "fast" and found["tries"][0]["rate"] == 2.0
    (row,) = map(orjson.loads, (raw / "sweep_rows.jsonl").read_bytes().splitlines())
    assert row["arm"] == "fast" and row["requests"] == 2 and "block" not in row
    requests = pq.read_table(raw / "sweep_requests.parquet").to_pylist()
    assert [(r["arm"], r["workload"], r["arrivals_s"][0]) for r in requests] == [
        ("fast", "code@2.000", 0.25)
    ] * 2


def test_a_sweep_alone_is_recorded(folder: Path, tmp_path: Path) -> None:
    acceptance = tmp_path / "benchmarks" / "results" / "acceptance.json"
    (folder / PLAN).unlink()
    record_ab(folder, "sweep_cpu", acceptance)
    assert [row.name for row in load(acceptance)] == ["ab.code.fast.capacity_rps"]
    kept = {file.name for file in (acceptance.parent / "sweep_cpu").iterdir()}
    assert kept == {
        "sweep.jsonl", "sweep_rows.jsonl", "sweep_requests.parquet", "goodput-code.png"
    }  # fmt: skip


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="bench ab"):
        record_ab(tmp_path, "ab_cpu", tmp_path / "a" / "b" / "acceptance.json")
