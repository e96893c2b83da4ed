"""No kernel reads or writes where it must not: the harness under NVIDIA's memory checker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HARNESS = [sys.executable, "-m", "tests.gpu.memory_harness"]
STEPS = ["convert", "store", "attend", "migrate", "restore"]
FOUND_ERRORS = 9
"""Exit status of the checker where it found any."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def run(command: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Every tensor an allocation of its own: the checker sees what leaves it.
    environment = os.environ | {"PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def steps_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line in STEPS]


def sanitizer() -> str | None:
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    if home := os.environ.get("CUDA_HOME"):
        folders += [f"{home}/bin", f"{home}/compute-sanitizer"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def test_harness_runs() -> None:
    done = run(HARNESS, 120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert steps_of(done) == STEPS


def test_memcheck_finds_nothing() -> None:
    tool = sanitizer()
    if tool is None:
        pytest.skip("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    options = ["--tool", "memcheck", "--target-processes", "application-only"]
    # Libraries ask for what a driver may lack; torch raises where an error matters.
    options += ["--report-api-errors", "no", "--error-exitcode", str(FOUND_ERRORS)]
    done = run([tool, *options, *HARNESS], 180)
    report = f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, report
    assert "ERROR SUMMARY: 0 errors" in done.stdout, report
    assert steps_of(done) == STEPS
