"""The command line, as far as it starts no server."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from patches import registry
from sglang_morph import patch_table
from sglang_morph.cli import app
from sglang_morph.cpu.environment import STAND_IN
from sglang_morph.flags import options_from_text
from sglang_morph.options import MorphOptions


@pytest.fixture
def run() -> CliRunner:
    return CliRunner()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell in which nothing is prepared."""
    for name in ("SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "PYTHONPATH", "SGLANG_MORPH"):
        monkeypatch.delenv(name, raising=False)


def exports(output: str) -> dict[str, str]:
    lines = (shlex.split(line) for line in output.splitlines())
    return dict(words[1].split("=", 1) for words in lines if words[0] == "export")


def test_env_prints_what_stock_entry_points_need(run: CliRunner, bare: None) -> None:
    flags = ["--memory-backend=layer_swap", "--morph-event-log", "a file", "--device", "cpu"]
    values = exports(run.invoke(app, ["env", *flags]).stdout)
    expected = MorphOptions(memory_backend="layer_swap", event_log="a file")
    assert options_from_text(values["SGLANG_MORPH"]) == expected
    assert values["SGLANG_USE_CPU_ENGINE"] == "1"
    assert values["PYTHONPATH"].split(os.pathsep)[0] == STAND_IN
    assert int(values["OMP_NUM_THREADS"]) >= 1


def test_env_prepares_no_other_device(run: CliRunner, bare: None) -> None:
    result = run.invoke(app, ["env", "--memory-backend", "layer_swap", "--device", "cuda"])
    assert exports(result.stdout) == {"SGLANG_MORPH": "--memory-backend layer_swap"}


@pytest.mark.parametrize("command", ["env", "exec"])
def test_bad_flags_exit_with_2_and_one_line(run: CliRunner, command: str) -> None:
    result = run.invoke(app, [command, "--morph-max-level", "x", "--", "true"])
    assert result.exit_code == 2
    assert result.stderr.startswith("sglang_morph: argument --morph-max-level")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--memory-backend", "layer_swap", "--morph-order", "back"],
        ["--memory-backend=layer_swap", "--morph-order=back"],
    ],
    ids=["apart", "joined"],
)
def test_exec_runs_the_command_in_that_environment(
    run: CliRunner, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda *args: called.append(args))
    command = ["prog", "--device", "cuda", "--", "x"]
    assert run.invoke(app, ["exec", *flags, "--", *command]).exit_code == 0
    [(file, argv, environ)] = called
    assert (file, argv) == ("prog", command)
    expected = MorphOptions(memory_backend="layer_swap", order="back")
    assert options_from_text(environ["SGLANG_MORPH"]) == expected


@pytest.mark.parametrize(
    ("command", "message"),
    [([], "no command given"), (["--", "no-such-program"], "cannot run no-such-program: No such")],
)
def test_exec_without_a_command_that_runs(run: CliRunner, command: list[str], message: str) -> None:
    result = run.invoke(app, ["exec", "--memory-backend", "layer_swap", *command])
    assert result.exit_code == 2
    assert message in result.stderr


def test_patches_fit(run: CliRunner) -> None:
    result = run.invoke(app, ["patches"], env={"COLUMNS": "500"})
    assert result.exit_code == 0
    for patch in registry.ALL_PATCHES:
        assert patch.name in result.stdout


def test_patch_that_does_not_fit_is_named(run: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(registry.ALL_PATCHES[0], source_sha256="0" * 64)
    patches = (changed, *registry.ALL_PATCHES[1:])
    monkeypatch.setattr(patch_table, "ALL_PATCHES", patches)
    result = run.invoke(app, ["patches", "--check"])
    assert result.exit_code == 1
    assert f"{changed.name}: {changed.target} is changed" in result.stdout
    assert "1 do not fit" in result.stdout


def test_doctor_runs_every_kernel(run: CliRunner) -> None:
    result = run.invoke(app, ["doctor", "--prebuild"])
    assert result.exit_code == 0
    assert "int4: torch._weight_int4pack_mm_for_cpu, error 0.00" in result.output


def test_doctor_reports_this_machine(run: CliRunner) -> None:
    result = run.invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "0.5.17 (patches fit 0.5.17)" in result.stdout
    assert "GiB" in result.stdout


def test_importing_the_command_line_is_light() -> None:
    script = "import sys, sglang_morph.cli; assert not {'torch', 'sglang'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", script], check=True)
