"""What the report says before the numbers, and where its points go, on runs made by hand."""

from pathlib import Path

import msgspec
import pytest

from sglang_morph.bench.outcome import Outcome
from sglang_morph.bench.plan import Plan, decode_path
from sglang_morph.bench.record import Observed, Record, kv_pressure
from sglang_morph.bench.replay import Replay
from sglang_morph.bench.report import notes, rate_points
from sglang_morph.bench.results import ArmRun, Comparison
from sglang_morph.bench.statistics import Slo, replay_row
from sglang_morph.bench.sweep import Capacity, Try
from sglang_morph.bench.workload import PlannedRequest, Workload
from sglang_morph.demo.samples import Sample

ORIGIN = {"command": "c", "commit": "abc", "date": "2030-01-01T00:00:00", "hardware": "a CPU"}
PLAN = {
    "name": "p",
    "model": "m",
    "arms": [{"name": "one", "command": "x"}, {"name": "two", "command": "x"}],
    "workloads": [{"name": name, "trace": "t.csv"} for name in ("slow", "fast", "other")],
    "sweeps": [{"workload": "slow", "low": 1.0, "high": 9.0}],
}


def record(rate: float, first_s: float) -> Record:
    """Two requests, `rate` a second, each with its first token after `first_s`."""
    outcomes = [
        Outcome(i, 0.0, 1, 1, sent_s=0.0, output_tokens=1, arrivals_s=[s], arrival_tokens=[1])
        for i, s in enumerate((first_s, 9.0))
    ]
    workload = Workload("w", [PlannedRequest(0.0, [1], 1)] * 2, 2 / rate, {})
    row = replay_row(Replay(outcomes, 0.0, 4.0), workload, Slo())
    return Record(row, outcomes, Observed(0.0, [], [], 0, {0: 2}))


def comparison(kv_gib: float = 1.0) -> Comparison:
    """Arm `two` has `kv_gib` of KV cache where `one` has 1."""
    records = {"slow": record(1.0, 0.5), "fast": record(4.0, 3.0), "other": record(2.0, 0.5)}
    runs = [
        ArmRun(
            0,
            arm,
            Path(),
            {"origin": ORIGIN, "memory": {"sglang": {"weight": 3.0, "kvcache": kv}}},
            records,
        )
        for arm, kv in (("one", 1.0), ("two", kv_gib))
    ]
    traces = {"slow": "a.csv", "fast": "a.csv", "other": "b.csv"}
    description = {
        "card": None,
        "workloads": [{"name": n, "origin": {"trace": t}} for n, t in traces.items()],
    }
    plan = msgspec.convert(PLAN, Plan, dec_hook=decode_path)
    return Comparison(plan, description, Slo(), runs, planned=2)


@pytest.mark.parametrize(("kv_gib", "warned"), [(1.0, False), (1.05, False), (1.5, True)])
def test_arms_with_unequal_memory_are_warned_of(kv_gib: float, warned: bool) -> None:
    found = [note for note in notes(comparison(kv_gib)) if note.startswith("WARNING")]
    assert len(found) == warned
    if warned:
        assert "one 4.00 GiB, two 4.50 GiB" in found[0]


def test_goodput_is_by_trace_with_the_rates_of_the_sweep() -> None:
    tried = [Try(7.0, 0.5, 3.5)]
    elsewhere = Capacity("one", "not compared", 0.9, tried, over=False)
    points = rate_points(comparison(), [Capacity("two", "slow", 0.9, tried, over=True), elsewhere])
    # One of two requests met the SLO, in 4 s.
    assert points["a.csv"]["one"] == [(1.0, 0.25), (4.0, 0.0)]
    assert points["a.csv"]["two"] == [(1.0, 0.25), (4.0, 0.0), (7.0, 3.5)]
    assert points["b.csv"] == {"one": [(2.0, 0.25)], "two": [(2.0, 0.25)]}
    assert points["not compared"] == {"one": [(7.0, 3.5)]}


def test_pressure_is_that_of_requests_until_the_last_answer() -> None:
    def sample(at: float, used: int, cached: int, waiting: int) -> Sample:
        return Sample(at, used, cached, 100 - used - cached, 1, waiting, 0, 0, 0)

    samples = [sample(1, 95, 5, 2), sample(2, 50, 50, 0), sample(9, 100, 0, 5)]
    assert kv_pressure(samples, until=5.0) == {
        "peak_use": 0.95,
        "share_above_90": 0.5,
        "share_waiting": 0.5,
    }
    assert kv_pressure(samples, until=0.0)["peak_use"] is None
