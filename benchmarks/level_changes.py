"""What level changes cost while requests decode: gaps, uploads beside decoding, failures.

Times are compared between a server's event log and the arrivals at this client, so both must run on
one machine. A token arrives a few milliseconds after its step; that is far less than what is
measured here takes, and the same before and after.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.served import Batch, Morphing, equal_requests, send
from sglang_morph.observability.event_log import read_events
from sglang_morph.precision.names import NOMINAL_BITS

INPUTS, OUTPUTS = 512, 768
EDGE_S = 0.05
"""Left out at both ends of a batch's decoding."""
BEFORE_S = 0.15
"""Over which the steps before a change are looked at."""
AFTER_S = 0.02
"""How long after a change a gap can still come from it: the step in flight, and its way here."""
BITS = 8

Gap = tuple[float, float]
"""Arrivals of two successive tokens of a request, UNIX seconds."""


class Load:
    """Batches of equal requests, one after the other, until told to end."""

    def __init__(self, url: str, size: int) -> None:
        self.batches: list[Batch] = []
        self._url = url
        self._size = size
        self._ended = threading.Event()

    @contextmanager
    def running(self) -> Iterator[Load]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            seed = len(self.batches)
            workload = equal_requests(self._size, INPUTS, OUTPUTS, seed)
            self.batches.append(send(self._url, workload))

    @property
    def failed(self) -> int:
        return sum(batch.failed for batch in self.batches)


def measure_changes(
    url: str, log: Path, rounds: int, changes: int, pause_s: float, batch: int
) -> dict[str, Any]:
    """Every level up and down one by one, `rounds` times, then random changes; all under load.

    `log` is the server's event log; it runs under the manual policy and is at level 0.
    """
    morphing = Morphing(url)
    digest = morphing.verify()
    levels = morphing.status()["levels"]
    top = deepest_level(levels)
    began = time.time()
    with Load(url, batch).running() as load:
        time.sleep(2.0)
        for _ in range(rounds):
            for level in [*range(1, top + 1), *reversed(range(top))]:
                morphing.set_level(level)
                time.sleep(0.35)
        marks = _random_changes(morphing, top, changes, pause_s)
    status = morphing.go_to(0)
    events = transitions_since(log, began)
    return {
        "rounds": rounds,
        "random_changes": len(marks),
        "failed_requests": load.failed,
        "weights_equal": morphing.verify() == digest,
        "requests": sum(len(batch.outcomes) for batch in load.batches),
        "steps_of_levels": [level["steps"] for level in levels],
        "top": top,
        "host_backup": status["bytes"]["host_backup"],
        "counts": status["monitor"]["transitions"],
        "downshift": downshift_gaps(load.batches, events),
        "restore": restore_ratio(load.batches, events),
        "events": [_short(event) for event in events],
    }


def transitions_since(log: Path, began: float) -> list[dict[str, Any]]:
    """Of an event log, from UNIX second `began` on."""
    return [e for e in read_events(log) if e["kind"] == "transition" and e["time"] >= began]


def deepest_level(levels: Sequence[dict[str, Any]]) -> int:
    """The last level with no variant of less than 8 bits."""
    fine = [
        number
        for number, level in enumerate(levels)
        if all(NOMINAL_BITS[variant] >= BITS for variant in level["variants"])
    ]
    return max(fine)


def _random_changes(morphing: Morphing, top: int, changes: int, pause_s: float) -> list[int]:
    """The levels gone to; each is reached before the next is asked for."""
    rng = random.Random(5)
    wanted = [0]
    while len(wanted) <= changes:
        wanted.append(rng.choice([level for level in range(top + 1) if level != wanted[-1]]))
    for level in wanted[1:]:
        morphing.go_to(level)
        time.sleep(pause_s)
    return wanted[1:]


def _short(event: dict[str, Any]) -> dict[str, Any]:
    kept = ("time", "from", "to", "result", "phase", "duration_s", "pages_lent", "pages_withdrawn")
    return {key: event[key] for key in (*kept, "pages_migrated", "pages_evicted", "error")}


def downshift_gaps(batches: Sequence[Batch], events: Sequence[dict[str, Any]]) -> list[dict]:
    """For each downshift in steady decoding, by how much its longest gap exceeds the median step.

    A gap is the median over the requests of the batch: what stops the server stops all of them,
    what delays one stream stops one.
    """
    found = []
    for event in events:
        if (event["phase"], event["result"]) != ("lower", "completed"):
            continue
        end, begin = event["time"] + AFTER_S, event["time"] - event["duration_s"]
        gaps = _steady_gaps(batches, begin - BEFORE_S, end)
        if not gaps:
            continue
        before = [b - a for request in gaps for a, b in request if b < begin]
        longest = [
            max((b - a for a, b in request if b > begin and a < end), default=0.0)
            for request in gaps
        ]
        step_s, longest_s = statistics.median(before), statistics.median(longest)
        found.append(
            {
                "from": event["from"],
                "to": event["to"],
                "step_ms": step_s * 1e3,
                "gap_above_step_ms": (longest_s - step_s) * 1e3,
                "duration_ms": event["duration_s"] * 1e3,
            }
        )
    return found


def restore_ratio(batches: Sequence[Batch], events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Steps at a fixed level while a restore's uploads run, over those just before it.

    Of restores by one level only: the weights stay as they are from the withdrawal of the pages to
    the commit, and uploads run in between. Only gaps that lie wholly there count.
    """
    ratios: list[float] = []
    rows = []
    for event, done in pairwise(events):
        if event["result"] != "started" or done["phase"] != "restore":
            continue
        if event["from"] - event["to"] != 1 or done["result"] != "completed":
            continue
        withdrawing = event["time"] - event["duration_s"]
        gaps = _steady_gaps(batches, withdrawing - BEFORE_S, done["time"])
        before = [b - a for request in gaps for a, b in request if b < withdrawing]
        during = [
            b - a
            for request in gaps
            for a, b in request
            if a >= event["time"] and b <= done["time"]
        ]
        if not before or not during:
            continue
        step_s = statistics.median(before)
        ratios += [gap / step_s for gap in during]
        rows.append(
            {
                "from": event["from"],
                "to": event["to"],
                "upload_ms": (done["time"] - event["time"]) * 1e3,
                "step_ms": step_s * 1e3,
                "step_while_uploading_ms": statistics.median(during) * 1e3,
                "gaps": len(during),
            }
        )
    ratio = statistics.median(ratios) if ratios else None
    return {"tpot_ratio": ratio, "gaps": len(ratios), "restores": rows}


def _steady_gaps(batches: Sequence[Batch], begin: float, end: float) -> list[list[Gap]]:
    """Gaps between `begin` and `end`, by request, of the batch that decodes all that time."""
    for batch in batches:
        arrivals = [[batch.started + a for a in o.arrivals_s] for o in batch.outcomes if o.ok]
        if len(arrivals) < len(batch.outcomes):
            continue
        first, last = max(a[0] for a in arrivals) + EDGE_S, min(a[-1] for a in arrivals) - EDGE_S
        if first <= begin and end <= last:
            near = ([t for t in times if begin - 1.0 < t < end + 1.0] for times in arrivals)
            return [[(a, b) for a, b in pairwise(ts) if b >= begin and a <= end] for ts in near]
    return []


def measure_levels(url: str) -> list[dict[str, Any]]:
    """Capacity and bytes by owner at every level, of an idle server."""
    morphing = Morphing(url)
    rows = []
    for level, described in enumerate(morphing.status()["levels"]):
        status = morphing.go_to(level)
        rows.append(
            {
                "level": level,
                "steps": described["steps"],
                "bits": min(NOMINAL_BITS[variant] for variant in described["variants"]),
                "base_tokens": status["base_tokens"],
                "capacity_tokens": status["capacity_tokens"],
                "bytes": status["bytes"],
            }
        )
    morphing.go_to(0)
    return rows


def lowered_speed(url: str, rounds: int, batch: int) -> dict[str, Any]:
    """Output tokens/s of a batch at the deepest 8-bit level and at level 0, by turns."""
    morphing = Morphing(url)
    top = deepest_level(morphing.status()["levels"])
    speeds: dict[int, list[float]] = {0: [], top: []}
    for turn in range(rounds):
        for level in [0, top] if turn % 2 == 0 else [top, 0]:
            morphing.go_to(level)
            workload = equal_requests(batch, INPUTS, 256, seed=40 + turn)
            speeds[level].append(send(url, workload).output_tokens_per_s)
    morphing.go_to(0)
    pairs = zip(speeds[top], speeds[0], strict=True)
    return {
        "batch": batch,
        "level": top,
        "full_tokens_per_s": speeds[0],
        "lowered_tokens_per_s": speeds[top],
        "ratio": statistics.median(low / full for low, full in pairs),
    }
