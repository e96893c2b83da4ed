"""Arms whose servers run at once and take turns, with stubs for servers."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from sglang_morph.bench.arm_run import CONTROL
from sglang_morph.bench.cli import app
from sglang_morph.bench.plan import Arm, Plan, PlannedWorkload, read_plan
from sglang_morph.bench.progress import RunLine
from sglang_morph.bench.report import notes
from sglang_morph.bench.results import load_comparison
from sglang_morph.bench.schedule import make_schedule
from sglang_morph.bench.sweep import read_capacities, try_name
from sglang_morph.bench.tables import arms_table
from sglang_morph.bench.together_run import turns
from sglang_morph.bench.workload import Workload

STUB = "python -m tests.sglang_morph.bench.stub_server --tbt 0.005"
PLAN = """
name = "stubs"
model = "{model}"
servers = "together"
repetitions = 1
settle_timeout_s = 20
drain_timeout_s = 20

[warmup]
requests = 2
rate = 50
output_tokens = 2

[control]
requests = 3
rate = 20
output_tokens = 3

[[arms]]
name = "static"
command = "{stub} --slots 8"
weights_gib = 0.5

[[arms]]
name = "broken"
command = "{stub} --no-such-flag"

[[arms]]
name = "morph"
command = "{stub} --slots 2 --memory-backend layer_swap"

[[sweeps]]
workload = "first"
low = 40.0
high = 400.0
steps = 2
duration_s = 0.28
arms = ["static", "broken", "morph"]

[[sweeps]]
workload = "second"
low = 40.0
high = 400.0
steps = 2
arms = ["morph"]

[[workloads]]
name = "first"
trace = "trace.csv"
token_factor = 0.1

[[workloads]]
name = "second"
trace = "trace.csv"
token_factor = 0.05
"""


def bench(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("together")
    rows = [f"2023-11-16 18:17:{0.05 * i:07.4f},{200 + i},{40 + 5 * i}" for i in range(12)]
    (folder / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    path = folder / "plan.toml"
    path.write_text(PLAN.format(model=model, stub=STUB))
    return path


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def order_of(plan: Plan) -> list[tuple[int, str, str]]:
    names = [CONTROL, *(workload.name for workload in plan.workloads)]
    workloads = [Workload(name, [], 1.0, {}) for name in names]
    runs = make_schedule([arm.name for arm in plan.arms], plan.repetitions)
    return [(t.run.block, t.workload.name, t.run.arm) for t in turns(plan, runs, workloads)]


def plan_of(**arms_by_workload: list[str] | None) -> Plan:
    return Plan(
        name="p",
        model=Path("m"),
        arms=[Arm(name=name, command="x") for name in "abc"],
        workloads=[
            PlannedWorkload(name=name, trace=Path("t.csv"), arms=arms)
            for name, arms in arms_by_workload.items()
        ],
        repetitions=2,
    )


def test_all_arms_take_one_workload_before_the_next() -> None:
    order = order_of(plan_of(w=None, x=None))
    assert order[:9] == [
        *((0, CONTROL, arm) for arm in "abc"),
        *((0, "w", arm) for arm in "abc"),
        *((0, "x", arm) for arm in "cba"),
    ]
    assert [block for block, _, _ in order] == [0] * 9 + [1] * 9
    assert len(set(order)) == 18


def test_a_workload_that_names_its_arms_is_theirs_in_that_order() -> None:
    order = order_of(plan_of(w=["c", "a"], x=None))
    assert order[3:8] == [(0, "w", "c"), (0, "w", "a"), *((0, "x", arm) for arm in "cba")]
    assert order[11:13] == [(1, "w", "a"), (1, "w", "c")]


def test_a_part_of_a_plan_starts_the_arms_it_needs_and_no_other(plan: Path, tmp_path: Path) -> None:
    text = plan.read_text() + 'arms = ["morph", "static"]\n'
    path = plan.with_name("part.toml")
    path.write_text(text)
    wanted = ("ab", "--plan", path, "--output", tmp_path, "--workload", "second")
    status, text = bench(*wanted)
    assert status == 0, text
    assert {folder.name for folder in (tmp_path / "servers").iterdir()} == {"static-0", "morph-0"}
    found = load_comparison(tmp_path)
    assert all(set(run.records) == {CONTROL, "second"} for run in found.runs)
    assert found.workloads == ["second"] and found.planned == 2
    starts = {run.arm: run.records["second"].observed.started for run in found.runs}
    assert starts["morph"] < starts["static"]
    assert "4 of 4 turns are done" in " ".join(notes(found))
    status, text = bench("ab", "--plan", path, "--output", tmp_path)
    assert status == 2 and "another plan" in text


def test_arms_may_be_left_for_a_later_call(plan: Path, tmp_path: Path) -> None:
    wanted = ("ab", "--plan", plan, "--output", tmp_path)
    assert bench(*wanted, "--arm", "morph")[0] == 0
    assert [folder.name for folder in (tmp_path / "servers").iterdir()] == ["morph-0"]
    status, text = bench(*wanted, "--arm", "static", "--arm", "morph")
    assert status == 0, text
    assert {f.name for f in (tmp_path / "servers").iterdir()} == {"morph-0", "static-0"}
    found = load_comparison(tmp_path)
    assert {run.arm for run in found.runs if run.records} == {"static", "morph"}
    status, text = bench(*wanted, "--arm", "other")
    assert status == 2 and "no arm 'other'" in text


def test_a_comparison_cut_off_shows_what_it_has_and_goes_on(plan: Path, tmp_path: Path) -> None:
    status, text = bench("ab", "--plan", plan, "--output", tmp_path, "--stop-after", 0.1)
    assert status == 3 and "3 runs are left" in text
    cut_off = load_comparison(tmp_path)
    # The first turn is always taken: the control of the reference arm.
    assert {run.arm: list(run.records) for run in cut_off.runs} == {
        "static": [CONTROL],
        "broken": [],
        "morph": [],
    }
    assert "1 of 9 turns are done" in " ".join(notes(cut_off))
    before = (tmp_path / "runs" / "block00-static-0" / f"{CONTROL}.jsonl").stat().st_mtime_ns

    status, text = bench("ab", "--plan", plan, "--output", tmp_path)
    assert status == 3 and "1 runs are left" in text  # the arm that can't start
    found = load_comparison(tmp_path)
    static, broken, morph = found.runs
    assert set(static.records) == set(morph.records) == {CONTROL, "first", "second"}
    error = broken.report["error"]
    assert not broken.records and error.startswith("ServerFailed") and "no-such-flag" in error
    control = tmp_path / "runs" / "block00-static-0" / f"{CONTROL}.jsonl"
    assert control.stat().st_mtime_ns == before, "a turn that was taken is not taken again"
    assert morph.report["weights_identical"] is True
    # Its own measure of its weights would hold what the others loaded meanwhile.
    assert "weight" not in morph.report["memory"]["sglang"]
    assert static.report["memory"]["sglang"]["weight"] == 0.5
    assert {row[0]: row[4] for row in arms_table(found)[1:]}["morph"] == "identical"
    starts = {
        run.arm: [run.records[name].observed.started for name in ("first", "second")]
        for run in (static, morph)
    }
    assert starts["static"][0] < starts["morph"][0] < starts["morph"][1] < starts["static"][1]
    assert len(list((tmp_path / "servers").iterdir())) == 6, "each start keeps its own log"
    assert bench("report", tmp_path)[0] == 0
    assert "took turns" in (tmp_path / "report.md").read_text()


def test_a_search_that_is_cut_off_has_as_many_tries_of_every_arm(
    plan: Path, tmp_path: Path
) -> None:
    status, text = bench("sweep", "--plan", plan, "--output", tmp_path, "--stop-after", 0)
    assert status == 2 and "no-such-flag" in text and not read_capacities(tmp_path)

    status, text = bench("sweep", "--plan", plan, "--output", tmp_path)
    assert status == 2 and "no-such-flag" in text, "the others are done before it is told"
    found = {(c.workload, c.arm): c for c in read_capacities(tmp_path)}
    searches = [("first", "static"), ("first", "morph"), ("second", "morph")]
    assert set(found) == set(searches) and all(c.over for c in found.values())
    rounds = [
        [
            (tmp_path / "sweep" / workload / arm / f"{try_name(workload, rate)}.jsonl")
            .stat()
            .st_mtime_ns
            for workload, arm in searches
            for rate in [found[workload, arm].tries[step].rate]
        ]
        for step in range(2)
    ]
    assert rounds[0] == sorted(rounds[0]) and max(rounds[0]) < min(rounds[1])
    assert found["first", "static"].tries[0].rate == pytest.approx((40 * 400) ** 0.5)
    first = next((tmp_path / "sweep" / "first" / "morph").glob("first@*.jsonl"))
    assert json.loads(first.read_text())["requests"] == 6, "the window is the sweep's"
    assert len(list((tmp_path / "servers").glob("morph-*"))) == 2, "both searches on one server"

    results = {path: path.stat().st_mtime_ns for path in tmp_path.glob("sweep/*/*/capacity.json")}
    status, _ = bench("sweep", "--plan", plan, "--output", tmp_path, "--workload", "second")
    assert status == 0, "the arm that doesn't start has no search there"
    assert len(results) == 3 and all(p.stat().st_mtime_ns == at for p, at in results.items())
    assert len(list((tmp_path / "servers").glob("morph-*"))) == 2, "what is over is not repeated"


def test_one_arm_can_be_searched_alone(plan: Path, tmp_path: Path) -> None:
    status, _ = bench("sweep", "--plan", plan, "--output", tmp_path, "--arm", "static")
    assert status == 0, "the arm that doesn't start is none of it"
    assert [(c.workload, c.arm) for c in read_capacities(tmp_path)] == [("first", "static")]
    status, text = bench("sweep", "--plan", plan, "--output", tmp_path, "--arm", "x")
    assert status == 2 and "no arm 'x'" in text


@pytest.mark.parametrize("command", ["ab", "sweep"])
def test_a_server_that_is_late_to_start_is_ended_before_anything_is_measured(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    late = PLAN.replace("--no-such-flag", "--start-after 600")
    late = late.replace("settle_timeout_s", "start_timeout_s = 8\nsettle_timeout_s")
    path = plan.parent / "late.toml"
    path.write_text(late.format(model=read_plan(plan).model, stub=STUB))
    late_while_measured: list[bool] = []

    def note(*_: object) -> None:
        commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        late_while_measured.append(any("--start-after" in words for words in commands))

    monkeypatch.setattr(RunLine, "replaying", note)
    arms = ["--arm", "static", "--arm", "broken"]
    status, text = bench(command, "--plan", path, "--output", tmp_path, *arms)
    assert status == (3 if command == "ab" else 2), text
    assert late_while_measured and not any(late_while_measured)


def test_slots_and_an_emulated_card_are_refused(plan: Path, tmp_path: Path) -> None:
    status, text = bench("ab", "--plan", plan, "--output", tmp_path, "--time-budget", 600)
    assert status == 2 and "--stop-after" in text
    status, text = bench("ab", "--plan", plan, "--output", tmp_path, "--gpu-memory-gib", 24)
    assert status == 2 and "--max-total-tokens" in text


@pytest.mark.parametrize("in_background", [False, True])
def test_ending_it_in_a_turn_ends_the_servers_and_leaves_no_half_turn(
    plan: Path, tmp_path: Path, in_background: bool
) -> None:
    slow = plan.with_name("slow.toml")  # first arrivals last 3 s, so that it is ended among them
    slow.write_text(
        plan.read_text().replace("token_factor = 0.1", "token_factor = 0.1\nfactor = 0.2")
    )
    command = [sys.executable, "-m", "sglang_morph.cli", "bench", "ab", "--plan", str(slow)]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path)],
        stdout=subprocess.PIPE,
        # as a shell without job control does to what it starts in the background
        preexec_fn=ignore_interrupts if in_background else None,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if b"static-0: first" in line:
            break
    time.sleep(0.4)  # answers are coming in
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    assert process.wait(30) != 0
    run = tmp_path / "runs" / "block00-static-0"
    assert (run / f"{CONTROL}.jsonl").exists() and not (run / "first.jsonl").exists()
    commands = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    assert not any(str(tmp_path) in command for command in commands), "a server outlived it"
