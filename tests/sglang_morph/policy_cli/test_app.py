"""The commands, on files a user would give."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from sglang_morph.controller.two_mode import load_solution
from sglang_morph.policy_cli.app import app
from tests.sglang_morph.policy_cli.test_replay import burst, start

runner = CliRunner()
PNG = b"\x89PNG"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [f"2023-11-16 18:00:{i % 60:02}.{i // 60:03}0000,{900 + i},200" for i in range(400)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *sorted(rows)]))
    return path


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in [start(), *burst([0] * 12)]))
    return path


def test_simulate_compares_policies(trace: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    arguments = ["simulate", "--trace", str(trace), "--rate", "20", "--plot", str(plot)]
    done = runner.invoke(app, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    for name in ("full", "low", "threshold:mode=accuracy", "two_mode", "slo"):
        assert name in done.output
    assert "400 requests at 20.00/s" in done.output
    assert plot.read_bytes().startswith(PNG)


def test_simulate_prints_markdown(trace: Path) -> None:
    arguments = ["simulate", "--trace", str(trace), "--policy", "full", "--markdown"]
    done = runner.invoke(app, arguments)
    assert done.output.splitlines()[2].startswith("| full | 100.0% |")


def test_replay_shows_when_and_what(events: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    arguments = ["replay", str(events), "--policy", "threshold", "--plot", str(plot)]
    done = runner.invoke(app, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "pressure 0.95 >= 0.85" in done.output
    assert plot.read_bytes().startswith(PNG)


def test_solve_writes_what_the_server_reads(tmp_path: Path) -> None:
    out = tmp_path / "solution.json"
    done = runner.invoke(app, ["solve", "--accuracy-cost", "0.6", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "Submodularity holds" in done.output
    assert load_solution(str(out)).assumptions["accuracy_cost"] == 0.6


def test_solve_takes_sizes_from_a_trace(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "solution.json"
    done = runner.invoke(app, ["solve", "--trace", str(trace), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert load_solution(str(out)).assumptions["output_tokens"] == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--trace", "{trace}", "--policy", "oracle"], "unknown policy 'oracle'"),
        (
            ["simulate", "--trace", "{trace}", "--policy", "slo:speed=1"],
            "unknown parameter 'speed'",
        ),
        (["simulate", "--trace", "{trace}", "--policy", "slo:mode"], "write mode=VALUE"),
        (
            ["simulate", "--trace", "{trace}", "--policy", "slo:quality_budget=much"],
            "Expected `float",
        ),
        (
            ["simulate", "--trace", "{trace}", "--policy", "threshold:enter_pressure=2"],
            "--morph-enter-pressure is 2",
        ),
        (["simulate", "--trace", "{trace}", "--policy", "threshold:mode=bold"], "--morph-mode"),
        (["simulate", "--trace", "{trace}", "--profile", "none"], "one of h200-llama-8b"),
        (["simulate", "--trace", "{trace}", "--densest"], "--densest needs --seconds"),
        (["simulate", "--trace", "nowhere.csv"], "nowhere.csv"),
        (["simulate", "--trace", "{trace}", "--token-factor", "0"], "--token-factor is 0"),
        (["simulate", "--trace", "{trace}", "--rate", "-1"], "above 0"),
        (["replay", "nowhere.jsonl"], "can't be read"),
        (["replay", "{trace}"], "not a row of an event log"),
        (["solve", "--accuracy-cost", "0.000001"], "raise --accuracy-cost"),
        (["solve", "--load", "-1"], "load is -1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    trace: Path, arguments: list[str], message: str
) -> None:
    done = runner.invoke(app, [argument.format(trace=trace) for argument in arguments])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
