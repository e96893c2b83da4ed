"""A whole `bench ab` on real servers: static, `layer_swap` and int8 for good; and its report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from sglang_morph.bench.arm_run import CONTROL
from sglang_morph.bench.results import Comparison, load_comparison, values
from sglang_morph.bench.tables import control_table
from tests.browser import image_widths, overflow, shown_page

pytestmark = pytest.mark.server

SERVER = (
    "python -m sglang_morph.launch_server --model-path {model} --device cpu --dtype float32"
    " --max-total-tokens 512 --context-length 512 --sleep-on-idle --decode-log-interval 5"
    " --memory-backend"
)
PLAN = """
name = "SmolLM2 on a CPU"
model = "{model}"
repetitions = 1
settle_timeout_s = 60

[slo]
ttft_s = 3.0
gap_factor = 20.0

[warmup]
requests = 2
input_tokens = 16
output_tokens = 4

[control]
requests = 3
rate = 1.0
input_tokens = 16
output_tokens = 8

[[arms]]
name = "static"
command = "{server} static"
quality = {{ "0" = 0.8 }}

[[arms]]
name = "layer_swap"
command = "{server} layer_swap"
quality = {{ "0" = 0.8, "1" = 0.7, "2" = 0.7, "3" = 0.6, "4" = 0.6 }}

[[arms]]
name = "int8"
command = "{server} layer_swap --morph-policy manual"
level = 3
quality = {{ "3" = 0.6 }}

[[workloads]]
name = "burst"
trace = "trace.csv"
densest = true
duration_s = 4
token_factor = 0.1

[[workloads]]
name = "calm"
trace = "trace.csv"
duration_s = 6
token_factor = 0.1
"""
BURST = 14
"""Requests within a second, of 64 tokens each: 896 tokens where there are 512."""


def azure_trace() -> str:
    """As the Azure traces of 2023 are written: a request each 5 s, and in between a burst."""
    quiet = [f"2023-11-16 18:17:{5 * i:02d}.0000000,120,60" for i in range(4)]
    burst = [
        f"2023-11-16 18:17:21.{70 * i:04d}000,{400 + 10 * (i % 3)},{240 - i}" for i in range(BURST)
    ]
    return "\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *quiet, *burst])


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the finished comparison, with its report."""
    root = tmp_path_factory.mktemp("bench")
    (root / "trace.csv").write_text(azure_trace())
    plan = root / "plan.toml"
    plan.write_text(PLAN.format(model=smollm2, server=SERVER.format(model=smollm2)))
    output = root / "runs"
    bench("ab", "--plan", str(plan), "--output", str(output))
    bench("report", str(output))
    return output


def bench(*arguments: str) -> None:
    command = [sys.executable, "-m", "sglang_morph.cli", "bench", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def found(folder: Path) -> Comparison:
    return load_comparison(folder)


def test_every_request_is_answered_with_the_tokens_it_asked_for(found: Comparison) -> None:
    assert [run.report["error"] for run in found.runs] == [None] * 3
    for workload, requests in (("burst", BURST), ("calm", 2)):
        rows = [run.records[workload].row for run in found.runs]
        assert {row["completed"] for row in rows} == {requests}
        assert {row["prompt_length_mismatches"] for row in rows} == {0}
        assert len({row["workload"]["digest"] for row in rows}) == 1


def test_nothing_moves_at_low_load(found: Comparison) -> None:
    assert [row[0] for row in control_table(found)[1:]] == ["static", "layer_swap", "int8"]
    assert {row[-1] for row in control_table(found)[1:]} == {"yes"}


def test_collections_of_garbage_are_short_in_every_process_from_the_warm_up_on(
    found: Comparison,
) -> None:
    for run in found.runs:
        log = (run.folder / "server.log").read_text()
        for process in ("Tokenizer Manager", "Scheduler", "Detokenizer Manager"):
            assert log.count(f"Freezing GC in {process} process") == 1


def test_memory_is_what_was_short_and_layer_swap_made_more(found: Comparison) -> None:
    seen = {
        run.arm: values(run.records["burst"], found.slo, found.plan.arm(run.arm))
        for run in found.runs
    }
    assert seen["static"]["peak_kv_tokens"] == 512
    assert seen["static"]["peak_kv_use"] > 0.8 and seen["static"]["waiting_share"] > 0
    assert seen["layer_swap"]["peak_kv_tokens"] > 512
    assert seen["layer_swap"]["transitions"] >= 2
    assert seen["int8"]["transitions"] == 0 and seen["int8"]["peak_kv_tokens"] > 4096
    shares = {arm: value["full_precision_token_share"] for arm, value in seen.items()}
    assert shares["static"] == 1 and shares["int8"] == 0 and 0 < shares["layer_swap"] < 1


def test_the_next_trace_begins_at_the_resting_level_with_nothing_cached(found: Comparison) -> None:
    for run in found.runs:
        calm = run.records["calm"]
        assert calm.row["cached_tokens"] == 0
        rest = {"static": 0, "layer_swap": 0, "int8": 3}[run.arm]
        assert set(calm.observed.tokens_by_level) == {rest}


def test_weights_come_back_bit_for_bit(found: Comparison) -> None:
    assert {run.arm: run.report["weights_identical"] for run in found.runs} == {
        "static": None,
        "layer_swap": True,
        "int8": True,
    }


def test_the_limit_on_gaps_comes_from_the_control_of_the_reference_arm(found: Comparison) -> None:
    (_, record), *_ = found.records("static", CONTROL)
    gaps = [itl for outcome in record.outcomes for itl in outcome.itls_s]
    assert min(gaps) <= found.slo.base_tbt_s <= max(gaps)


def test_the_numbers_to_keep_are_there(folder: Path) -> None:
    kept = orjson.loads((folder / "measures.json").read_bytes())["measures"]
    names = {measure["name"] for measure in kept}
    for arm in ("static", "layer_swap", "int8"):
        for what in ("p95_ttft_s", "slo_attainment", "throughput", "full_precision_token_share"):
            assert f"ab.burst.{arm}.{what}" in names


def test_the_report_shows_in_a_browser(folder: Path, tmp_path: Path) -> None:
    dom = shown_page(folder / "report.html", tmp_path)
    widths = image_widths(dom)
    assert len(widths) == 5 and min(widths) > 600
    assert overflow(dom) <= 0
    for expected in ("effective score", "passed", "relative to static", "int8", "layer_swap"):
        assert expected in dom
