"""Where a measurement comes from: command, commit, date and hardware."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PROJECT = Path(__file__).parents[2]
_GIB = 2**30
COMMIT_VARIABLE = "SGLANG_MORPH_COMMIT"
"""Commit to record where the files are a copy without their history."""


@dataclass(frozen=True, slots=True)
class Provenance:
    command: str
    commit: str
    """Short commit id, with `-dirty` where files differ from it; `unknown` outside a checkout."""
    date: str
    """UTC, ISO 8601, to the second."""
    hardware: str


def provenance(command: str) -> Provenance:
    """Provenance of something measured by `command` here and now."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return Provenance(command, _commit(), now.isoformat(timespec="seconds"), _hardware())


def _commit() -> str:
    if (given := os.environ.get(COMMIT_VARIABLE)) is not None:
        return given
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=_PROJECT,
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _hardware() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    return f"{_gpu_model()}{_cpu_model()}, {os.cpu_count()} cores, {memory:.0f} GiB memory"


def _gpu_model() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.splitlines()[0] + ", "


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
