"""How much host memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = CGROUP) -> int:
    """What the machine has free (page cache counted as free), or less if the cgroup allows less."""
    free = psutil.virtual_memory().available
    limited = _cgroup_v2(cgroup)
    return free if limited is None else min(free, limited)


def _cgroup_v2(folder: Path) -> int | None:
    """Bytes left under `memory.max`; None where there is no limit or no cgroup v2."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        statistics = (folder / "memory.stat").read_text()
    except OSError:
        return None
    if limit == "max":
        return None
    cached = dict(line.split() for line in statistics.splitlines()).get("inactive_file", "0")
    return max(0, int(limit) - used + int(cached))
