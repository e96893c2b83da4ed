"""A whole comparison with stub servers as arms: runs, resuming, slots, sweep and report."""

import re

import orjson
import pytest
from typer.testing import CliRunner

from sglang_morph.bench.arm_run import EVENTS
from sglang_morph.bench.cli import app
from sglang_morph.bench.measures import AT_LEAST, LESS_THAN, capacity_measure, measures
from sglang_morph.bench.outcome import read_outcomes
from sglang_morph.bench.results import load_comparison
from sglang_morph.bench.sweep import Capacity, Try, read_capacities
from sglang_morph.bench.tables import control_table
from sglang_morph.observability.event_log import read_events
from tests.browser import image_widths, overflow, shown_page

PLAN = """
name = "stubs"
model = "{model}"
repetitions = 2
expected_start_s = 2
settle_timeout_s = 20
drain_timeout_s = 20

[slo]
ttft_s = 0.3

[warmup]
requests = 2
rate = 20
output_tokens = 2

[control]
requests = 3
rate = 4
output_tokens = 5

[[arms]]
name = "static"
command = "python -m tests.sglang_morph.bench.stub_server --slots 2 --tbt 0.02"
quality = {{ "0" = 0.5 }}

[[arms]]
name = "morph"
command = "{stub} --slots 2 --tbt 0.02 --memory-backend layer_swap"
quality = {{ "0" = 0.5, "1" = 0.4 }}

[[arms]]
name = "dummy"
command = "python -m tests.sglang_morph.bench.stub_server --slots 8 --tbt 0.02"

[[workloads]]
name = "burst"
trace = "trace.csv"
token_factor = 0.1
max_output_tokens = 12

[[sweeps]]
workload = "burst"
low = 8.0
high = 40.0
steps = 3
"""
STUB = "python -m tests.sglang_morph.bench.stub_server"


def bench(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def plan(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("plan")
    rows = [f"2023-11-16 18:17:{0.1 * i:07.4f},{200 + i},{40 + 5 * i}" for i in range(20)]
    (folder / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    path = folder / "plan.toml"
    path.write_text(PLAN.format(model=model, stub=STUB))
    return path


@pytest.fixture(scope="module")
def done(plan, tmp_path_factory):
    """Folder of a comparison that was interrupted once and then finished."""
    output = tmp_path_factory.mktemp("ab")
    status, text = bench("ab", "--plan", plan, "--output", output, "--stop-after", 1)
    assert status == 3 and "5 runs are left" in text
    half = output / "runs" / "block00-morph-0"
    half.mkdir()  # a run that was interrupted: no marker
    (half / "left-over").touch()
    status, text = bench("ab", "--plan", plan, "--output", output)
    assert status == 0, text
    assert not (half / "left-over").exists()
    return output


def test_every_run_is_done_once_in_counterbalanced_order(done):
    found = load_comparison(done)
    order = ["static", "morph", "dummy"]
    assert [(run.block, run.arm) for run in found.runs] == [
        *((0, arm) for arm in order),
        *((1, arm) for arm in reversed(order)),
    ]
    assert all(run.report["error"] is None for run in found.runs)


def test_finished_runs_are_not_repeated(done, plan):
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*") if path.is_file()}
    assert bench("ab", "--plan", plan, "--output", done)[0] == 0
    assert before == {p: p.stat().st_mtime_ns for p in done.rglob("*") if p in before}


def test_every_arm_got_the_same_requests_and_the_row_says_so(done):
    found = load_comparison(done)
    records = [run.records["burst"] for run in found.runs]
    assert len({record.row["workload"]["digest"] for record in records}) == 1
    prompts = {tuple((o.at_s, o.prompt_tokens) for o in r.outcomes) for r in records}
    assert len(prompts) == 1
    # The stub's words are a digest of the prompt.
    assert len({tuple(o.text[:4] for o in r.outcomes) for r in records}) == 1
    assert all(record.row["completed"] == 20 for record in records)


def test_the_slo_uses_the_control_of_the_reference_arm(done):
    base = load_comparison(done).slo.base_tbt_s
    assert 0.02 <= base < 0.1


def test_the_morphing_arm_was_quiet_in_the_control_and_moved_in_the_burst(done):
    found = load_comparison(done)
    for run in found.runs:
        changes = {name: len(record.observed.transitions) for name, record in run.records.items()}
        assert changes["low-load-control"] == 0
        assert (changes["burst"] > 0) == (run.arm == "morph")
        assert run.report["weights_identical"] is (True if run.arm == "morph" else None)
    (_, record), *_ = found.records("morph", "burst")
    assert 0 < record.row["full_precision_token_share"] < 1
    assert {sample.level for sample in record.observed.samples} == {0, 1}


def test_an_arm_with_a_level_of_its_own_rests_there_and_goes_back_at_the_end(plan, tmp_path):
    text, pinned = plan.read_text(), plan.with_name("pinned.toml")
    arm = re.search(r'\[\[arms]]\nname = "morph".*?\n\n', text, re.DOTALL)[0]
    text = re.sub(r"\[\[arms]].*(?=\[\[workloads)", lambda _: arm, text, flags=re.DOTALL)
    text = text.replace('swap"', 'swap --morph-policy manual"\nlevel = 1')
    pinned.write_text(text.replace("repetitions = 2", "repetitions = 1"))
    assert bench("ab", "--plan", pinned, "--output", tmp_path)[0] == 0
    found = load_comparison(tmp_path)
    (run,) = found.runs
    for record in run.records.values():
        assert not record.observed.transitions and record.row["full_precision_token_share"] == 0
    assert run.report["memory"]["morph"]["resting_tokens"] == 4095 + 512
    levels = [e["to"] for e in read_events(run.folder / EVENTS) if e["kind"] == "transition"]
    assert levels == [1, 0] and run.report["weights_identical"]
    assert control_table(found)[1][-1] == "yes"


def test_another_plan_in_the_same_folder_is_refused(done, plan):
    other = plan.with_name("other.toml")
    other.write_text(plan.read_text().replace("repetitions = 2", "repetitions = 3"))
    status, text = bench("ab", "--plan", other, "--output", done)
    assert status == 2 and "another plan" in text


def test_a_time_budget_makes_slots_that_all_have_the_reference(plan, tmp_path):
    status, text = bench(
        "ab", "--plan", plan, "--output", tmp_path, "--time-budget", 60, "--dry-run"
    )
    assert status == 0
    slots = re.findall(r"slot (\d+): (\w+)", text)
    for slot in {slot for slot, _ in slots}:
        assert [arm for s, arm in slots if s == slot].count("static") == 1
    status, text = bench("ab", "--plan", plan, "--output", tmp_path, "--time-budget", 20)
    assert status == 2 and "too short" in text


def test_a_server_that_does_not_start_says_why(plan, tmp_path):
    broken = plan.with_name("broken.toml")
    broken.write_text(plan.read_text().replace("--slots 2", "--no-such-flag", 1))
    status, text = bench("ab", "--plan", broken, "--output", tmp_path)
    assert status == 2 and "no-such-flag" in text


def test_the_report_has_everything_in_one_file(done, plan):
    status, text = bench("sweep", "--plan", plan, "--output", done)
    assert status == 0 and "capacity" in text
    assert {found.origin["command"][:12] for found in read_capacities(done)} == {"sglang-morph"}
    assert bench("report", done)[0] == 0
    page = (done / "report.html").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)""", page) and "<script" not in page
    table = (done / "report.md").read_text()
    for expected in ("SLO attainment", "relative to static", "low-load control", "capacity"):
        assert expected in page and expected in table
    assert "| effective score" in table
    assert re.search(r"TTFT P95 \(s\) .*\* \|", table), "the best arm has a star"


def test_numbers_to_keep_have_names_by_workload_and_arm(done):
    found = load_comparison(done)
    capacity = Capacity("dummy", "burst", 0.9, [Try(2.0, 1.0, 2.0), Try(8.0, 0.5, 4.0)], over=True)
    kept = {m.name: m.value for m in [*measures(found), capacity_measure(capacity)]}
    assert kept["ab.burst.dummy.capacity_rps"] == 2.0
    missed = [Try(2.0, 0.0, 0.0), Try(1.5, 0.1, 0.1)]
    below = capacity_measure(Capacity("dummy", "burst", 0.9, missed, True))
    assert (below.value, below.unit) == (1.5, LESS_THAN)
    held = capacity_measure(Capacity("dummy", "burst", 0.9, [Try(2.0, 1.0, 2.0)], True))
    assert (held.value, held.unit) == (2.0, AT_LEAST)
    assert kept["ab.burst.static.full_precision_token_share"] == 1.0
    assert kept["ab.burst.morph.full_precision_token_share"] < 1
    assert {"ab.burst.static.p95_ttft_s", "ab.burst.morph.slo_attainment"} <= kept.keys()


def test_the_report_shows_in_a_browser(done, tmp_path):
    assert bench("report", done)[0] == 0
    dom = shown_page(done / "report.html", tmp_path)
    assert len(image_widths(dom)) == 3 and min(image_widths(dom)) > 600
    assert overflow(dom) <= 0 and dom.count("<tr>") > 30


def test_one_replay_from_the_command_line(stub_server, plan, model, tmp_path):
    url = stub_server("--tbt", "0.005")
    arguments = ["replay", "--url", url, "--trace", plan.with_name("trace.csv"), "--model", model]
    arguments += ["--output", tmp_path, "--token-factor", 0.1, "--rate", 40, "--output-details"]
    status, text = bench(*arguments, "--route", "sglang-oai")
    assert status == 0, text
    assert "20 of 20" in text
    (row,) = map(orjson.loads, (tmp_path / "results.jsonl").read_bytes().splitlines())
    outcomes = read_outcomes(tmp_path / "replay.requests.parquet")
    assert row["backend"] == "sglang-oai" and row["prompt_length_mismatches"] == 0
    assert row["output_lens"] == [outcome.wanted_tokens for outcome in outcomes]
    assert row["offered_rate"] == pytest.approx(40.0)
    assert bench(*arguments, "--route", "grpc")[0] == 2
    assert bench(*arguments, "--start", 99)[1].strip().endswith("the trace ends at 1.9 s")
