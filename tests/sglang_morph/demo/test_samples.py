import pytest

from memory_backends.base import MemoryReport
from sglang_morph.controller.signals import Signals
from sglang_morph.demo.model_shape import ModelShape
from sglang_morph.demo.samples import morph_samples, parse_metrics, static_samples
from sglang_morph.observability.event_log import EventLog, read_events

SHAPE = ModelShape(layer_weight_bytes=4_000, page_bytes=10)
METRICS = """\
# HELP sglang:kv_used_tokens Used.
# TYPE sglang:kv_used_tokens gauge
sglang:kv_used_tokens{tp_rank="0"} 300.0
sglang:kv_evictable_tokens{tp_rank="0"} 40.0
sglang:kv_available_tokens{tp_rank="0"} 660.0
sglang:num_running_reqs{tp_rank="0"} 5.0
sglang:num_queue_reqs{tp_rank="0",priority=""} 2.0
sglang:num_queue_reqs{tp_rank="0",priority="1"} 1.0
sglang:num_retracted_requests_total{tp_rank="0"} 7.0
sglang:e2e_request_latency_seconds_bucket{le="0.1"} 1.0
"""


def test_metrics_become_samples():
    values = parse_metrics(METRICS)
    (sample,) = static_samples([(5.0, {}), (6.0, values)], SHAPE)
    assert (sample.time, sample.capacity, sample.level) == (6.0, 1000, 0)
    assert (sample.used, sample.cached, sample.free) == (300, 40, 660)
    assert (sample.running, sample.waiting) == (5, 3)
    assert (sample.full_bytes, sample.lowered_bytes) == (4_000, 0)
    assert values["sglang:num_retracted_requests_total"] == 7


def test_event_log_becomes_samples(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), sample_interval_s=0.25)
    signals = Signals(
        now=100.0,
        base_pages=1000,
        capacity_pages=1500,
        free_pages=200,
        evictable_pages=100,
        running=9,
        waiting=4,
        oldest_wait_s=0.5,
        admission_blocked=True,
        level=2,
    )
    report = MemoryReport(
        full_weights=3_000,
        variant_weights=250,
        kv_base=10_000,
        kv_lent=5_000,
        unused=0,
        host_backup=4_000,
        host_variants=900,
    )
    log.signals(signals, lambda: report)
    log.close()
    (sample,) = morph_samples(read_events(path))
    assert (sample.used, sample.cached, sample.free) == (1200, 100, 200)
    assert (sample.capacity, sample.level, sample.waiting) == (1500, 2, 4)
    assert (sample.full_bytes, sample.lowered_bytes) == (3_000, 250)
    assert sample.time == pytest.approx(read_events(path)[0]["t"])
