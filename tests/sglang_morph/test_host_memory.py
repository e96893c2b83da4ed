"""Host memory under a cgroup's limit."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sglang_morph.host_memory import available_bytes

MIB = 1 << 20


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    """300 MiB allowed, 200 MiB used, 50 MiB of them page cache that can be dropped."""
    (tmp_path / "memory.max").write_text(f"{300 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{200 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {150 * MIB}\ninactive_file {50 * MIB}\n")
    return tmp_path


def test_limit_counts_and_page_cache_is_free(cgroup: Path) -> None:
    assert available_bytes(cgroup) == 150 * MIB


def test_nothing_is_left_above_the_limit(cgroup: Path) -> None:
    (cgroup / "memory.current").write_text(f"{400 * MIB}\n")
    assert available_bytes(cgroup) == 0


@pytest.mark.parametrize("limit", ["max\n", None])
def test_without_a_limit_the_machine_counts(
    cgroup: Path, limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is None:
        (cgroup / "memory.max").unlink()
    else:
        (cgroup / "memory.max").write_text(limit)
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert available_bytes(cgroup) == memory.available
