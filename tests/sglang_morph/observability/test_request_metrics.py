"""Counters of requests, in prometheus-client's multiprocess mode as SGLang runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from sglang_morph.observability.event_log import EventLog, read_events

SCHEDULER = """
from sglang_morph.controller.exposure import Exposure, StepLevels
from sglang_morph.observability.request_metrics import RequestMetrics

assert RequestMetrics.create(False, {}) is None
metrics = RequestMetrics.create(True, {"model_name": "smol"})
for result in ("held", "held", "rejected"):
    metrics.floor(result)
steps, exposure = StepLevels(), Exposure()
exposure.prefill(0, 9, steps.steps, 0)
for level in (0, 2, 2):
    steps.launch(level)
exposure.leave(steps, 4)
exposure.reused_lowered = 3
metrics.ended(exposure)
metrics.ended(Exposure())
"""


def test_counters_of_floors_and_tokens(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", SCHEDULER], env=environment, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sglang_morph:{name}", {"model_name": "smol", **labels})

    assert value("floor_requests_total", result="held") == 2
    assert value("floor_requests_total", result="rejected") == 1
    assert value("request_tokens_total", phase="generated", level="0") == 2
    assert value("request_tokens_total", phase="generated", level="2") == 2
    assert value("request_tokens_total", phase="prefilled", level="0") == 9
    assert value("reused_lowered_tokens_total") == 3


def test_a_crowd_of_demands_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), 1.0)
    for number in range(1, 50):
        log.floor("held", "full", 0, 3, number)
    log.floor("held", "int8", 2, 3, 50)
    rows = [row for row in read_events(path) if row["kind"] == "floor"]
    assert [(row["result"], row["floor"], row["requests"]) for row in rows] == [
        ("held", 0, 1),
        ("held", 2, 50),
    ]
    assert rows[0]["min_precision"] == "full"
    assert rows[0]["level"] == 3
