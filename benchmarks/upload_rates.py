"""Steps of requests at a fixed level while a restore uploads, by the limit on the rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.level_changes import Load, deepest_level, restore_ratio, transitions_since
from benchmarks.served import Morphing

RATES = (2.5, 5.0, 10.0, 20.0, 40.0)
"""10^9 bytes a second. PCIe 5 carries about 50."""
ROUNDS = 3
SETTLED_S = 0.35
"""Of decoding at a level before it is left: what the steps are compared with."""


def measure_upload_rates(
    url: str, log: Path, rates: Sequence[float], batch: int
) -> list[dict[str, Any]]:
    """A row for each rate, and one without a limit, in turns under one load.

    The server runs under the manual policy and is at level 0; `log` is its event log.
    """
    morphing = Morphing(url)
    status = morphing.status()
    steps = [level["steps"] for level in status["levels"]]
    top = deepest_level(status["levels"])
    step_bytes = status["bytes"]["host_backup"] / steps[top]
    limits: list[float | None] = [*rates, None]
    began: dict[float | None, list[tuple[float, float]]] = {limit: [] for limit in limits}
    first = time.time()
    with Load(url, batch).running() as load:
        time.sleep(2.0)
        for turn in range(ROUNDS):
            for limit in limits if turn % 2 == 0 else reversed(limits):
                morphing.limit_uploads(limit)
                begin = time.time()
                _walk(morphing, top)
                began[limit].append((begin, time.time()))
    morphing.limit_uploads(None)
    events = transitions_since(log, first)
    rows = []
    for limit, spans in began.items():
        mine = [e for e in events if any(a <= e["time"] <= b for a, b in spans)]
        found = restore_ratio(load.batches, mine)
        rates_seen = [
            step_bytes * (steps[r["from"]] - steps[r["to"]]) / r["upload_ms"] / 1e6
            for r in found["restores"]
        ]
        rows.append(
            {
                "limit_gb_per_s": limit,
                "gb_per_s": statistics.median(rates_seen) if rates_seen else None,
                "failed_requests": load.failed,
                **found,
            }
        )
        print(f"limit {limit}: {rows[-1]['gb_per_s']} GB/s, {found['tpot_ratio']}", flush=True)
    return rows


def _walk(morphing: Morphing, top: int) -> None:
    """To the deepest level at once, and back one by one."""
    morphing.go_to(top)
    for level in reversed(range(top)):
        time.sleep(SETTLED_S)
        morphing.go_to(level)
    time.sleep(SETTLED_S)
