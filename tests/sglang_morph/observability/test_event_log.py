"""The event log: round trip, sampling, repeats, damaged files, and errors that must not spread."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from memory_backends.base import MemoryReport
from sglang_morph.controller.monitor import TransitionResult
from sglang_morph.controller.policy import Decision
from sglang_morph.controller.signals import Signals
from sglang_morph.observability import event_log
from sglang_morph.observability.event_log import RECENT_EVENTS, EventLog, read_events
from sglang_morph.observability.records import TransitionRecord
from sglang_morph.options import MorphOptions
from tests.sglang_morph.observability.ended import ended

UP = Decision(1, "pressure 0.90 >= 0.85 for 0.25 s")
TRIGGER = {
    "pressure": 0.9,
    "used_pages": 900,
    "capacity_pages": 1500,
    "oldest_wait_s": 0.25,
    "admission_blocked": True,
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "events.jsonl")


def kinds(rows: list[dict[str, Any]]) -> list[str]:
    return [row["kind"] for row in rows]


def test_round_trip_of_every_kind(
    path: str, signals: Signals, record: TransitionRecord, report: MemoryReport
) -> None:
    options = MorphOptions(memory_backend="layer_swap", variants=("int8", "int4"), event_log=path)
    before = time.time()
    log = EventLog(path, sample_interval_s=0.25)
    log.start(options, "abc123", base_pages=1000, maximum_pages=3000)
    log.signals(signals, lambda: report)
    log.decision(3, UP, replace(signals, level=0))
    log.transition(record)
    log.emergency(4, Decision(2, "next step would retract"), signals)
    log.transition(ended(record, result="rolled_back", error="no host memory"))
    log.close()

    rows = read_events(path)
    assert kinds(rows) == [
        "start",
        "signals",
        "decision",
        "transition",
        "emergency",
        "transition",
        "rollback",
    ]
    for row in rows:
        assert row["schema_version"] == 1
        assert before <= row.pop("time") <= time.time()
    start, sample, decision, transition, emergency, failed, rollback = rows

    assert start["options"]["memory_backend"] == "layer_swap"
    assert start["options"]["variants"] == ["int8", "int4"]
    assert set(start["options"]) == set(asdict(options))
    assert (start["plan_digest"], start["base_pages"], start["maximum_pages"]) == (
        "abc123",
        1000,
        3000,
    )
    assert before <= sample["t"] <= time.time()
    written = {**asdict(signals), "level_pages": list(signals.level_pages)}
    assert {name: sample[name] for name in written} == written
    assert (sample["pressure"], sample["used_pages"]) == (0.9, 900)
    assert sample["bytes"] == asdict(report)

    assert decision == {
        "kind": "decision",
        "schema_version": 1,
        "revision": 3,
        "from": 0,
        "to": 1,
        "reason": UP.reason,
        "trigger": TRIGGER,
    }
    assert transition == {
        "kind": "transition",
        "schema_version": 1,
        "revision": 4,
        "from": 0,
        "to": 1,
        "reason": record.reason,
        "result": "completed",
        "phase": "lower",
        "duration_s": 0.02,
        "pages_lent": 500,
        "pages_withdrawn": 0,
        "pages_migrated": 0,
        "pages_evicted": 0,
        "running": 7,
        "waiting": 3,
        "error": None,
        "trigger": TRIGGER,
    }
    assert (emergency["from"], emergency["to"], emergency["running"]) == (1, 2, 7)
    assert (failed["result"], failed["error"]) == ("rolled_back", "no host memory")
    assert rollback == {
        "kind": "rollback",
        "schema_version": 1,
        "revision": 4,
        "from": 0,
        "to": 1,
        "error": "no host memory",
    }


@pytest.mark.parametrize(
    ("result", "levels", "phase"),
    [
        ("completed", (0, 2), "lower"),
        ("started", (2, 0), "reclaim"),
        ("completed", (2, 0), "restore"),
        ("rolled_back", (2, 0), "restore"),
    ],
)
def test_phase(
    record: TransitionRecord, result: TransitionResult, levels: tuple[int, int], phase: str
) -> None:
    source, target = levels
    assert ended(record, result=result, from_level=source, to_level=target).phase == phase


def test_samples_are_spaced_and_cost_nothing_in_between(
    path: str, signals: Signals, report: MemoryReport
) -> None:
    log = EventLog(path, sample_interval_s=0.25)
    asked = 0

    def ask() -> MemoryReport:
        nonlocal asked
        asked += 1
        return report

    for tick in range(100):
        moment = replace(signals, now=5 + tick / 64)
        log.signals(moment, ask)
    log.close()
    times = [row["now"] for row in read_events(path)]
    assert times == [5 + n / 4 for n in range(7)]
    assert asked == 7


def test_a_row_is_in_the_file_at_once(path: str, signals: Signals, report: MemoryReport) -> None:
    log = EventLog(path, sample_interval_s=0.25)
    log.signals(signals, lambda: report)
    assert kinds(read_events(path)) == ["signals"]
    log.decision(0, UP, signals)
    assert kinds(read_events(path)) == ["signals", "decision"]
    log.close()


def test_repeated_decisions_are_one_row(
    signals: Signals, record: TransitionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(None, 0.25)
    low = replace(signals, level=0)
    for _ in range(50):
        log.decision(0, UP, low)
    assert kinds(list(log.recent)) == ["decision"]
    log.decision(0, Decision(2, "more"), low)
    log.transition(record)
    log.decision(1, Decision(2, "more"), low)
    monkeypatch.setattr(event_log, "REPEAT_S", 0.0)
    log.decision(1, Decision(2, "more"), low)
    assert kinds(list(log.recent)) == ["decision"] * 2 + ["transition"] + ["decision"] * 2


@pytest.mark.parametrize(
    ("result", "written"),
    [("deferred", ["transition"]), ("rolled_back", ["transition", "rollback"])],
)
def test_a_transition_that_fails_tick_after_tick_is_not_a_flood(
    record: TransitionRecord,
    result: TransitionResult,
    written: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = EventLog(None, 0.25)
    failed = ended(record, result=result, error="does not fit")
    for _ in range(1000):
        log.transition(failed)
    assert kinds(list(log.recent)) == written
    monkeypatch.setattr(event_log, "REPEAT_S", 0.0)
    log.transition(failed)
    assert kinds(list(log.recent)) == written * 2


def test_without_a_path_there_is_only_the_tail(
    signals: Signals, record: TransitionRecord, report: MemoryReport
) -> None:
    log = EventLog(None, 0.25)
    log.signals(signals, lambda: report)
    for revision in range(RECENT_EVENTS + 44):
        log.transition(replace(record, revision=revision))
    assert len(log.recent) == RECENT_EVENTS
    assert log.recent[0]["revision"] == 44
    assert log.dropped == 0
    log.close()


def unwritable_folder(tmp_path: Path) -> str:
    return str(tmp_path)


def missing_folder(tmp_path: Path) -> str:
    return str(tmp_path / "missing" / "events.jsonl")


@pytest.mark.parametrize("make_path", [unwritable_folder, missing_folder])
def test_a_file_that_cannot_be_opened_is_one_warning(
    tmp_path: Path,
    record: TransitionRecord,
    caplog: pytest.LogCaptureFixture,
    make_path: Callable[[Path], str],
) -> None:
    path = make_path(tmp_path)
    with caplog.at_level(logging.WARNING):
        log = EventLog(path, 0.25)
        log.transition(record)
        log.transition(record)
    assert [path in message for message in caplog.messages] == [True]
    assert (log.dropped, len(log.recent)) == (2, 2)
    log.close()


def test_a_bad_descriptor_is_one_warning_and_no_error(
    path: str,
    signals: Signals,
    record: TransitionRecord,
    report: MemoryReport,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = EventLog(path, 0.25)
    log.transition(record)
    assert log._file is not None
    os.close(log._file)
    with caplog.at_level(logging.WARNING):
        log.transition(record)
        log.signals(signals, lambda: report)
        log.decision(4, UP, signals)
    assert len(caplog.messages) == 1
    assert "Bad file descriptor" in caplog.messages[0]
    assert (log.dropped, len(log.recent)) == (3, 3)
    assert kinds(read_events(path)) == ["transition"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_warning_and_no_error(
    record: TransitionRecord, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog("/dev/full", 0.25)
    with caplog.at_level(logging.WARNING):
        log.transition(record)
        log.transition(record)
    assert len(caplog.messages) == 1
    assert "No space left" in caplog.messages[0]
    assert log.dropped == 2


def test_a_pipe_that_nobody_reads_does_not_block(tmp_path: Path, record: TransitionRecord) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    log = EventLog(str(pipe), 0.25)
    for _ in range(1000):
        log.transition(record)
    assert log.dropped > 0


def test_text_that_is_not_unicode_does_not_raise(path: str, record: TransitionRecord) -> None:
    log = EventLog(path, 0.25)
    log.transition(replace(record, reason="file \udcff is missing"))
    assert log.dropped == 1


def test_a_torn_last_line_is_left_out(path: str, record: TransitionRecord) -> None:
    log = EventLog(path, 0.25)
    log.transition(record)
    log.transition(replace(record, revision=5))
    log.close()
    whole = Path(path).read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole) - 1):
        Path(path).write_bytes(whole[:end])
        assert [row["revision"] for row in read_events(path)] == [4]


def test_a_new_run_starts_on_its_own_line(path: str, record: TransitionRecord) -> None:
    Path(path).write_bytes(b'{"kind":"transi')
    log = EventLog(path, 0.25)
    log.start(MorphOptions(), None, 10, 10)
    log.transition(record)
    log.close()
    assert kinds(read_events(path)) == ["start", "transition"]


def test_damage_elsewhere_is_an_error(path: str) -> None:
    Path(path).write_bytes(b'{"kind":"start"}\n{"kind":"sig\n{"kind":"signals"}\n')
    with pytest.raises(ValueError, match="line 2: not a row"):
        read_events(path)


def test_an_empty_log_has_no_rows(path: str) -> None:
    EventLog(path, 0.25).close()
    assert read_events(path) == []


def test_events_are_numbered_and_paged_newest_last(record: TransitionRecord) -> None:
    log = EventLog(None, 0.25)
    for revision in range(1, 301):
        log.transition(replace(record, revision=revision))

    def page(limit: int, after: int | None) -> tuple[list[int], int]:
        found = log.page(limit, after)
        assert found["last_id"] == 300
        assert [row["id"] for row in found["events"]] == [r["revision"] for r in found["events"]]
        return [row["id"] for row in found["events"]], found["missed"]

    assert page(3, None) == ([298, 299, 300], 0)
    assert page(2, 297) == ([298, 299], 0)
    assert page(100, 299) == ([300], 0)
    assert page(100, 300) == ([], 0)
    assert page(100, 900) == ([], 0)
    assert page(2, 10) == ([45, 46], 34)


def test_changes_and_evictions_are_rows(path: str, signals: Signals) -> None:
    log = EventLog(path, 0.25)
    log.operator(5, "limits", {"hold": True}, "applied", None)
    for _ in range(2):
        log.eviction(5, 12, "evict rather than lend 12 pages: ...", signals)
    change, eviction = read_events(path)
    assert (change["kind"], change["name"], change["change"]) == (
        "operator",
        "limits",
        {"hold": True},
    )
    assert (change["revision"], change["result"], change["reason"]) == (5, "applied", None)
    assert (eviction["kind"], eviction["pages"], eviction["level"]) == (
        "eviction",
        12,
        signals.level,
    )
    assert eviction["trigger"]["used_pages"] == signals.used_pages
