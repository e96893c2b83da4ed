"""Metrics in prometheus-client's multiprocess mode, written by one process and read by another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from sglang_morph.controller.signals import Signals
from sglang_morph.observability.metrics import GAUGES, MorphMetrics
from sglang_morph.observability.records import TransitionRecord
from tests.sglang_morph.observability.ended import ended

LABELS = {"model_name": "smol", "engine_type": "unified", "tp_rank": "0"}

PREAMBLE = f"""
import json, os, sys
from pathlib import Path
from sglang_morph.controller.outcome import Outcome
from sglang_morph.controller.signals import Signals
from sglang_morph.observability.metrics import MorphMetrics
from sglang_morph.observability.records import TransitionRecord
assert "prometheus_client" not in sys.modules
signals, records = json.loads(sys.argv[1])
signals = Signals(**signals)
records = [
    TransitionRecord(**{{**r, "signals": signals, "outcome": Outcome(**r["outcome"])}})
    for r in records
]
metrics = MorphMetrics.create(True, {LABELS!r})
"""


def run_scheduler(
    folder: Path, body: str, signals: Signals, records: list[TransitionRecord]
) -> str:
    """Run `body` as the scheduler process would, with the metrics' files in `folder`."""
    arguments = json.dumps([asdict(signals), [asdict(record) for record in records]])
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + body, arguments],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def collect(folder: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))  # type: ignore[no-untyped-call]
    return registry


def test_disabled_means_none() -> None:
    assert MorphMetrics.create(False, LABELS) is None


def test_values_reach_the_collector_of_another_process(
    tmp_path: Path, signals: Signals, record: TransitionRecord
) -> None:
    records = [
        record,
        ended(record, from_level=1, to_level=0, result="deferred"),
        ended(record, from_level=1, to_level=0, result="started", pages_migrated=30),
        ended(record, from_level=1, to_level=0, result="completed", duration_s=0.4),
        ended(record, result="rolled_back", error="no memory"),
        ended(record, pages_migrated=12),
    ]
    body = """
metrics.update(signals, layers_lowered=8, host_bytes=1)
metrics.update(signals, layers_lowered=8, host_bytes=280)
for record in records:
    metrics.transition(record)
metrics.retraction_avoided()
"""
    run_scheduler(tmp_path, body, signals, records)
    registry = collect(tmp_path)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sglang_morph:{name}", {**LABELS, **labels})

    assert {name: value(name) for name in GAUGES} == {
        "precision_level": 1,
        "layers_lowered": 8,
        "kv_capacity_tokens": 1500,
        "kv_base_tokens": 1000,
        "kv_lent_tokens": 500,
        "kv_used_tokens": 900,
        "kv_evictable_tokens": 50,
        "host_bytes": 280,
    }
    transitions = "transitions_total"
    assert value(transitions, from_level="0", to_level="1", result="completed") == 2
    for result in ("deferred", "started", "completed"):
        assert value(transitions, from_level="1", to_level="0", result=result) == 1
    assert value(transitions, from_level="0", to_level="1", result="rolled_back") == 1
    assert value("rollbacks_total") == 1
    assert value("retractions_avoided_total") == 1
    assert value("pages_migrated_total") == 42
    assert value("transition_seconds_count", phase="lower") == 2
    assert value("transition_seconds_sum", phase="lower") == pytest.approx(0.04)
    assert value("transition_seconds_count", phase="reclaim") == 1
    assert value("transition_seconds_bucket", phase="restore", le="0.25") == 0
    assert value("transition_seconds_bucket", phase="restore", le="0.5") == 1


def test_counters_are_exported_before_anything_happened(tmp_path: Path, signals: Signals) -> None:
    run_scheduler(tmp_path, "", signals, [])
    registry = collect(tmp_path)
    for name in ("rollbacks_total", "retractions_avoided_total", "pages_migrated_total"):
        assert registry.get_sample_value(f"sglang_morph:{name}", LABELS) == 0


def test_an_update_without_change_writes_nothing(tmp_path: Path, signals: Signals) -> None:
    """In `mostrecent` mode every write carries its time, so the files would differ."""
    body = """
def contents():
    folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    return {p.name: p.read_bytes() for p in folder.iterdir()}
metrics.update(signals, 8, 280)
first = contents()
metrics.update(signals, 8, 280)
second = contents()
metrics.update(signals, 9, 280)
print(first == second, second == contents())
"""
    assert run_scheduler(tmp_path, body, signals, []).split() == ["True", "False"]
