"""The event log: every decision and transition, and sampled signals, as JSON Lines.

One object a line, UTF-8. Schema version 1; every row has

- `kind`: one of those below
- `time`: UNIX seconds
- `schema_version`: 1

`start`, first of every run (a log is appended to, so one file may hold several runs):
`options` (the fields of `MorphOptions`), `plan_digest` (str, null without a plan), `base_pages` and
`maximum_pages` (KV pages without page 0, at level 0 and with everything lent).

`signals`, at most one per sample interval: `t` (equal to `time`), every field of `Signals` (`now`
is monotonic seconds), `used_pages`, `pressure` (used over base pages), `bytes` (the fields of
`MemoryReport`: bytes by owner).

`decision`: `revision`, `from`, `to`, `reason`, `trigger`.

`transition`: `revision`, `from`, `to`, `reason`, `result` (`completed`, `started`, `deferred` or
`rolled_back`; a restore is `started` when its pages are back and `completed` when its weights are),
`phase` (what `duration_s` was spent on: `lower`, `reclaim` or `restore`), `duration_s`,
`pages_lent`, `pages_withdrawn`, `pages_migrated`, `pages_evicted`, `running`, `waiting` (requests),
`error` (str or null), `trigger`.

`rollback`, after a transition that was rolled back: `revision`, `from`, `to`, `error`.

`emergency`, a morph made so that no running request is retracted: `revision`, `from`, `to`,
`reason`, `running`, `waiting`, `trigger`.

`eviction`, cached prefixes that are given up because lending in their place would cost more (see
`sglang_morph/controller/eviction_cost.py`): `revision`, `level`, `pages`, `reason` with both costs,
`trigger`.

`floor`, a request that asked for more precision than there is: `result` (`held`, `rejected`, or
`ignored`: served below its floor), `min_precision`, `floor` (highest level it allows), `level`,
`requests` (of that result so far). At most one of a result and floor in `REPEAT_S` seconds.

`operator`, a change an operator asked for: `revision` (after it), `name` (`level`, `policy` or
`limits`), `change` (the body), `result` (`applied`, `deferred`, `stale` or `conflict`), `reason`.

`trigger` holds the numbers a policy acts on: `pressure`, `used_pages`, `capacity_pages`,
`oldest_wait_s`, `admission_blocked`. `from` and `to` are precision levels.

A `decision` is written when it is carried out. A transition may be deferred or fail every tick:
the same row is written again only after `REPEAT_S` seconds.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from sglang_morph.controller.monitor import signal_values
from sglang_morph.controller.policy import Decision
from sglang_morph.controller.signals import Signals
from sglang_morph.observability.records import TransitionRecord
from sglang_morph.options import MorphOptions

if TYPE_CHECKING:
    from memory_backends.base import MemoryReport
    from sglang_morph.controller.changes import Result

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
RECENT_EVENTS = 256
REPEAT_S = 10.0

Row = dict[str, Any]


class EventLog:
    """Appends rows to a file and keeps the last `RECENT_EVENTS` that are not `signals`.

    Never raises for the file's sake and never waits for a reader: every row is one unbuffered,
    non-blocking append of a few hundred bytes, so it also survives a kill of the process. After the
    first error the file is left alone for good; rows that did not get into it are counted in
    `dropped`. Put the file on a local disk: the kernel may block on a network file system.
    """

    def __init__(self, path: str | None, sample_interval_s: float) -> None:
        """With `path` None there is no file, and nothing counts as dropped."""
        self.path = path
        self.dropped = 0
        self.recent: deque[Row] = deque(maxlen=RECENT_EVENTS)
        self._last_id = 0
        """Number of the last row in `recent`, counted from 1 at the start of this run."""
        self._sample_interval_s = sample_interval_s
        self._sampled_at: float | None = None
        self._repeats = _Repeats()
        self._file: int | None = None
        if path is not None:
            try:
                self._file = _open_for_append(path)
            except OSError as error:
                self._disable(error)

    def close(self) -> None:
        """Close the file. Later rows go to `recent` and count as dropped."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def start(
        self, options: MorphOptions, plan_digest: str | None, base_pages: int, maximum_pages: int
    ) -> None:
        """Page counts leave out page 0, SGLang's padding sink."""
        self._event(
            "start",
            options=asdict(options),
            plan_digest=plan_digest,
            base_pages=base_pages,
            maximum_pages=maximum_pages,
        )

    def signals(
        self, signals: Signals, report: Callable[[], MemoryReport], *, at_once: bool = False
    ) -> None:
        """Write a sample if one is due, or `at_once`; only then is `report` called."""
        if self.path is None or not (self._is_due(signals.now) or at_once):
            return
        now = time.time()
        values = {"t": now, **signal_values(signals), "bytes": asdict(report())}
        self._write(_row("signals", now, values))

    def decision(self, revision: int, decision: Decision, signals: Signals) -> None:
        level = signals.level
        if self._repeats.is_repeat("decision", (level, decision.target)):
            return
        self._event(
            "decision",
            revision=revision,
            **_move(level, decision.target),
            reason=decision.reason,
            trigger=_trigger(signals),
        )

    def transition(self, record: TransitionRecord) -> None:
        """Write `record`, and a `rollback` row if it was rolled back."""
        outcome = record.outcome
        move = (outcome.from_level, outcome.to_level)
        if outcome.result in ("started", "completed"):
            self._repeats.forget()
        elif self._repeats.is_repeat(outcome.result, move):
            return
        self._event(
            "transition",
            revision=record.revision,
            **_move(*move),
            reason=record.reason,
            result=outcome.result,
            phase=record.phase,
            duration_s=outcome.duration_s,
            pages_lent=outcome.pages_lent,
            pages_withdrawn=outcome.pages_withdrawn,
            pages_migrated=outcome.pages_migrated,
            pages_evicted=outcome.pages_evicted,
            running=record.signals.running,
            waiting=record.signals.waiting,
            error=outcome.error,
            trigger=_trigger(record.signals),
        )
        if outcome.result == "rolled_back":
            self._event("rollback", revision=record.revision, **_move(*move), error=outcome.error)

    def emergency(self, revision: int, decision: Decision, signals: Signals) -> None:
        """`decision` is the move that was made in place of a retraction."""
        self._event(
            "emergency",
            revision=revision,
            **_move(signals.level, decision.target),
            reason=decision.reason,
            running=signals.running,
            waiting=signals.waiting,
            trigger=_trigger(signals),
        )

    def floor(self, result: str, min_precision: str, floor: int, level: int, requests: int) -> None:
        if not self._repeats.is_repeat(f"floor {result} {floor}", (floor, floor)):
            self._event(
                "floor",
                result=result,
                min_precision=min_precision,
                floor=floor,
                level=level,
                requests=requests,
            )

    def eviction(self, revision: int, pages: int, reason: str, signals: Signals) -> None:
        """Up to `pages` cached pages are left to be evicted, although precision could fall."""
        if self._repeats.is_repeat("eviction", (signals.level, signals.level)):
            return
        self._event(
            "eviction",
            revision=revision,
            level=signals.level,
            pages=pages,
            reason=reason,
            trigger=_trigger(signals),
        )

    def operator(
        self, revision: int, name: str, change: Row, result: Result, reason: str | None
    ) -> None:
        """An operator asked for `change` of the `name` (level, policy or limits)."""
        self._event(
            "operator", revision=revision, name=name, change=change, result=result, reason=reason
        )

    def page(self, limit: int, after: int | None) -> Row:
        """Rows of `recent` with their ids, newest last: the first `limit` with an id above `after`,
        or the newest `limit`. `missed` counts rows after `after` that are forgotten already."""
        oldest = self._last_id - len(self.recent) + 1
        rows = [{"id": oldest + i, **row} for i, row in enumerate(self.recent)]
        if after is None:
            shown, missed = rows[-limit:], 0
        else:
            shown = rows[max(0, after + 1 - oldest) :][:limit]
            missed = max(0, oldest - 1 - after)
        return {"events": shown, "last_id": self._last_id, "missed": missed}

    def _is_due(self, now: float) -> bool:
        if self._sampled_at is not None and now - self._sampled_at < self._sample_interval_s:
            return False
        self._sampled_at = now
        return True

    def _event(self, kind: str, **values: Any) -> None:
        row = _row(kind, time.time(), values)
        self.recent.append(row)
        self._last_id += 1
        self._write(row)

    def _write(self, row: Row) -> None:
        if self._file is None:
            self.dropped += 1 if self.path is not None else 0
            return
        try:
            line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
            if os.write(self._file, line) != len(line):
                raise OSError("a row was written in part; the disk may be full")
        except (OSError, orjson.JSONEncodeError) as error:
            self.dropped += 1
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        logger.warning(
            "The event log %s is off from here on: %s. Serving goes on; restart with another "
            "--morph-event-log to record again.",
            self.path,
            error,
        )
        with suppress(OSError):  # The descriptor may be what is bad.
            self.close()


class _Repeats:
    """Tells a row that says what the last one of its kind said from one that is news."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[tuple[int, int], float]] = {}

    def is_repeat(self, kind: str, move: tuple[int, int]) -> bool:
        now = time.monotonic()
        last = self._last.get(kind)
        if last is not None and last[0] == move and now - last[1] < REPEAT_S:
            return True
        self._last[kind] = (move, now)
        return False

    def forget(self) -> None:
        """Something happened: whatever is said next is news."""
        self._last.clear()


def read_events(path: str | Path) -> list[Row]:
    """All rows of an event log, oldest first.

    A row cut short by a crash or a full disk is left out where one can occur: at the end of a run,
    that is at the end of the file or before a `start` row. Raises ValueError for any other damage,
    OSError if the file can't be read.
    """
    rows: list[Row] = []
    torn_line: int | None = None
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        row = _parse(line)
        if torn_line is not None and (row is None or row["kind"] != "start"):
            raise ValueError(f"{path}, line {torn_line}: not a row of an event log")
        torn_line = number if row is None else None
        if row is not None:
            rows.append(row)
    return rows


def _parse(line: bytes) -> Row | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and "kind" in row else None


def _open_for_append(path: str) -> int:
    """Descriptor of the file, created if need be, placed at the start of a line."""
    # Readable, to look at the last byte; non-blocking, so that a pipe without a reader can't hang
    # the scheduler.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
    file = os.open(path, flags, 0o644)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")
    except OSError:
        os.close(file)
        raise
    return file


def _row(kind: str, now: float, values: Row) -> Row:
    return {"kind": kind, "time": now, "schema_version": SCHEMA_VERSION, **values}


def _move(from_level: int, to_level: int) -> Row:
    return {"from": from_level, "to": to_level}


def _trigger(signals: Signals) -> Row:
    return {
        "pressure": signals.pressure,
        "used_pages": signals.used_pages,
        "capacity_pages": signals.capacity_pages,
        "oldest_wait_s": signals.oldest_wait_s,
        "admission_blocked": signals.admission_blocked,
    }
