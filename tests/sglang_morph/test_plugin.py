"""The entry point under stock SGLang: silent without the variable, and fail-closed with it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from sglang_morph import plugin

REPORT = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from patches.registry import ALL_PATCHES
applied = [patch.name for patch in ALL_PATCHES if patch.target in HookRegistry._patched]
print("APPLIED", len(applied), "of", len(ALL_PATCHES))
import sys
print("RUNTIME", "sglang_morph.runtime" in sys.modules)
print("HTTP", "sglang.srt.entrypoints.http_server" in sys.modules)
"""


def run(script: str, flags: str | None) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "SGLANG_MORPH"}
    if flags is not None:
        environ["SGLANG_MORPH"] = flags
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)


def test_sglang_finds_the_plugin() -> None:
    [entry] = entry_points(group="sglang.srt.plugins", name="sglang_morph")
    assert entry.load() is plugin.load


@pytest.mark.parametrize("text", [None, "", "  "])
def test_unset_variable_imports_nothing(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_MORPH", raising=False)
    if text is not None:
        monkeypatch.setenv("SGLANG_MORPH", text)
    monkeypatch.setattr(plugin, "_install", lambda text: pytest.fail("installed"))
    plugin.load()


def test_static_installs_no_hook() -> None:
    done = run(REPORT, "--memory-backend static")
    assert done.returncode == 0, done.stderr
    assert "APPLIED 0 of" in done.stdout


def test_elastic_backend_installs_every_patch_and_creates_no_runtime_yet() -> None:
    done = run(REPORT, "--memory-backend layer_swap")
    assert done.returncode == 0, done.stderr
    count = done.stdout.split()[1]
    assert f"APPLIED {count} of {count}\n" in done.stdout
    assert int(count) > 20
    assert "RUNTIME False" in done.stdout
    assert "HTTP False" in done.stdout


@pytest.mark.parametrize(
    ("setup", "flags", "message"),
    [
        ("", "--memory-backend", "SGLANG_MORPH: argument --memory-backend: expected one argument"),
        (
            "import sglang.srt.managers.scheduler as m\n"
            "m.Scheduler.get_next_batch_to_run = lambda self, running_batch, last_batch: None\n",
            "--memory-backend layer_swap",
            "patch 'tick' does not fit",
        ),
    ],
    ids=["bad flags", "patch that does not fit"],
)
def test_failure_ends_the_process(setup: str, flags: str, message: str) -> None:
    done = run(setup + REPORT, flags)
    assert done.returncode == 2
    assert "APPLIED" not in done.stdout
    [line] = [line for line in done.stderr.splitlines() if line.startswith("sglang_morph: ")]
    assert message in line
