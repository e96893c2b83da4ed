import pytest

from sglang_morph.bench.outcome import Outcome, read_outcomes, write_outcomes
from sglang_morph.bench.replay import Replay
from sglang_morph.bench.statistics import Slo, details, percentile, replay_row
from sglang_morph.bench.workload import PlannedRequest, Workload

# By hand: two tokens at 1.0 s, one at 1.4 s, one at 2.4 s; due at 0.5 s, sent at 0.502 s.
GOOD = Outcome(
    index=0,
    at_s=0.5,
    input_tokens=30,
    wanted_tokens=4,
    sent_s=0.502,
    prompt_tokens=30,
    output_tokens=4,
    arrivals_s=[1.0, 1.4, 2.4],
    arrival_tokens=[2, 1, 1],
    queue_s=0.1,
    retractions=1,
    text="a b c d",
)
# By hand: one token, 3.5 s after it was due.
SLOW = Outcome(
    index=1,
    at_s=1.0,
    input_tokens=10,
    wanted_tokens=1,
    sent_s=1.001,
    prompt_tokens=11,
    output_tokens=1,
    arrivals_s=[4.5],
    arrival_tokens=[1],
    queue_s=3.0,
    text="x",
)
FAILED = Outcome(
    index=2, at_s=2.0, input_tokens=5, wanted_tokens=9, sent_s=2.006, error="HTTP 503: no"
)
LENIENT = Slo()
WORKLOAD = Workload("w", [PlannedRequest(0.5, [1], 4)] * 3, 2.0, {})


def row(slo=LENIENT):
    return replay_row(Replay([GOOD, SLOW, FAILED], 1e9, duration_s=5.0), WORKLOAD, slo)


def test_one_request_by_hand():
    assert GOOD.ttft_s == pytest.approx(0.5)
    assert GOOD.latency_s == pytest.approx(1.9)
    assert GOOD.tpot_s == pytest.approx(1.4 / 3)
    assert GOOD.gaps_s == pytest.approx([0.4, 1.0])
    assert GOOD.max_gap_s == pytest.approx(1.0)
    assert GOOD.itls_s == pytest.approx([0.4, 1.0])
    assert GOOD.lateness_s == pytest.approx(0.002)
    assert SLOW.tpot_s is None and SLOW.max_gap_s is None
    assert not FAILED.ok and FAILED.ttft_s is None


def test_a_gap_before_several_tokens_is_shared_by_them():
    outcome = Outcome(0, 0.0, 1, 4, arrivals_s=[1.0, 1.6], arrival_tokens=[1, 3], output_tokens=4)
    assert outcome.itls_s == pytest.approx([0.2, 0.2, 0.2])
    assert outcome.max_gap_s == pytest.approx(0.6)


def test_the_row_by_hand():
    found = row()
    assert (found["completed"], found["failed"], found["requests"]) == (2, 1, 3)
    assert found["total_input_tokens"] == 41
    assert found["total_output_tokens"] == 5
    assert found["request_throughput"] == pytest.approx(2 / 5)
    assert found["output_throughput"] == pytest.approx(1.0)
    assert found["median_ttft_ms"] == pytest.approx(2000.0)
    assert found["mean_ttft_ms"] == pytest.approx(2000.0)
    assert found["std_ttft_ms"] == pytest.approx(1500.0)
    assert found["p90_ttft_ms"] == pytest.approx(500 + 0.9 * 3000)
    assert found["p99.9_ttft_ms"] == pytest.approx(500 + 0.999 * 3000)
    assert found["mean_e2e_latency_ms"] == pytest.approx((1900 + 3500) / 2)
    assert found["concurrency"] == pytest.approx((1.9 + 3.5) / 5)
    assert found["max_itl_ms"] == pytest.approx(1000.0)
    assert found["queue_time_ms"]["max"] == pytest.approx(3000.0)
    assert found["lateness_ms"]["p50"] == pytest.approx(2.0)
    assert found["prompt_length_mismatches"] == 1
    assert found["retractions"] == 1
    # Seconds counted from 0.5: tokens 2 + 1 in the first, 1 in the second, 1 in the fifth.
    assert found["max_output_tokens_per_s"] == 3
    assert found["max_concurrent_requests"] == 2
    assert found["offered_rate"] == pytest.approx(1.5)


def test_failed_and_slow_requests_miss_the_slo():
    found = row()
    assert found["slo_attainment"] == pytest.approx(1 / 3)
    assert found["goodput"] == pytest.approx(1 / 5)
    assert row(Slo(ttft_s=4.0))["slo_attainment"] == pytest.approx(2 / 3)
    # The longest gap is 1.0 s: 5 x 0.25 s allows it, 5 x 0.15 s doesn't.
    assert row(Slo(base_tbt_s=0.25))["slo_attainment"] == pytest.approx(1 / 3)
    assert row(Slo(base_tbt_s=0.15))["slo_attainment"] == 0.0


def test_nothing_answered_gives_no_numbers_but_a_row():
    found = replay_row(Replay([FAILED], 1e9, 1.0), WORKLOAD, Slo())
    assert found["completed"] == 0 and found["mean_ttft_ms"] is None
    assert found["slo_attainment"] == 0.0 and found["max_concurrent_requests"] == 0


def test_it_has_every_key_of_bench_serving():
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    source = Path(find_spec("sglang").submodule_search_locations[0]) / "benchmark" / "serving.py"
    tree = ast.parse(source.read_text())
    written = {
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("result", "result_details")
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    }
    # Of its other datasets, and what only the caller of replay_row knows.
    other = {"sharegpt_output_len", "random_input_len", "random_output_len", "random_range_ratio"}
    caller = {
        "tag", "backend", "dataset_name", "server_info", "total_output_tokens_retokenized",
    }  # fmt: skip
    assert "mean_ttft_ms" in written and "ttfts" in written
    assert written - other - caller <= row().keys() | details([GOOD]).keys()


def test_percentiles_are_linear_between_ranks():
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == pytest.approx(2.5)
    assert percentile([1.0, 2.0, 3.0, 4.0], 99) == pytest.approx(3.97)


def test_outcomes_survive_the_parquet_file(tmp_path):
    path = tmp_path / "requests.parquet"
    write_outcomes(path, [GOOD, SLOW, FAILED])
    assert read_outcomes(path) == [GOOD, SLOW, FAILED]


def test_the_lists_of_output_details():
    lists = details([GOOD, FAILED])
    assert lists["output_lens"] == [4, 0]
    assert lists["ttfts"] == pytest.approx([0.5, 0.0])
    assert lists["errors"] == ["", "HTTP 503: no"]
