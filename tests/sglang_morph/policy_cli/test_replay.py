"""Replays of recorded signals, written by the real event log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from sglang_morph.controller.signals import Signals
from sglang_morph.policy_cli.replay import ReplayError, as_seen_at, replay, runs_of
from sglang_morph.policy_cli.spec import parse_spec
from tests.sglang_morph.controller.conftest import make_signals

SPEC = "threshold:leave_hold_s=2"
WALL = 1_700_000_000.0
Row = dict[str, Any]


def row_of(signals: Signals) -> Row:
    return {"kind": "signals", "time": WALL + signals.now, **asdict(signals), "pressure": 0.0}


def transition(at_s: float, source: int, target: int, result: str = "completed") -> Row:
    return {
        "kind": "transition",
        "time": WALL + at_s,
        "from": source,
        "to": target,
        "reason": "why",
        "result": result,
    }


def start() -> Row:
    return {"kind": "start", "time": WALL, "maximum_pages": 2000}


def burst(levels: Sequence[int]) -> list[Row]:
    """Ten readings a second: 2 s calm, 6 s at 950 pages, calm again; `levels` once a second."""
    rows = []
    for index in range(10 * len(levels)):
        now = index / 10
        used = 950 if 2 <= now < 8 else 100
        rows.append(row_of(make_signals(now, used=used, level=levels[index // 10])))
    return rows


def test_shows_when_it_would_have_acted_beside_what_happened() -> None:
    rows = [
        start(),
        *burst([0] * 4 + [1] * 6 + [0] * 5),
        transition(4.0, 0, 1),
        transition(4.5, 1, 2, "deferred"),
    ]
    (run,) = runs_of(rows)
    found = replay(run, parse_spec(SPEC))
    assert [(a.source, a.target) for a in found.actions] == [(0, 1), (1, 0)]
    assert found.actions[0].at_s == pytest.approx(2.2, abs=0.11)
    assert found.actions[1].at_s == pytest.approx(10.0, abs=0.11)
    assert [(a.at_s, a.target) for a in run.happened] == [(pytest.approx(4.0), 1)]
    assert found.seconds_below_full(found.levels) == pytest.approx(7.8, abs=0.3)
    assert found.seconds_below_full(found.recorded_levels) == pytest.approx(6.0, abs=0.2)
    assert found.agreement == pytest.approx(1 - 1.8 / 14.9, abs=0.03)


def test_every_run_of_a_log_starts_anew() -> None:
    rows = [start(), *burst([0] * 12), start(), *burst([0] * 12)]
    found = [replay(run, parse_spec(SPEC)) for run in runs_of(rows)]
    assert [len(one.actions) for one in found] == [2, 2]


def test_rows_of_an_older_log_are_enough() -> None:
    rows = burst([0] * 12)
    new = {"waiting_tokens", "arrived_tokens_total", "ttft_s", "tpot_s", "retractions_total"}
    old = [{k: v for k, v in row.items() if k not in new} for row in rows]
    (run,) = runs_of(old)
    assert len(replay(run, parse_spec(SPEC)).actions) == 2


def test_lent_pages_are_as_seen_or_in_proportion() -> None:
    rows = [start(), row_of(make_signals(0.0)), row_of(make_signals(1.0, level=2))]
    (run,) = runs_of(rows)
    assert run.lent_pages == [0, 500, 1000]
    (higher,) = runs_of([start(), row_of(make_signals(0.0))], top_level=4)
    assert higher.lent_pages == [0, 250, 500, 750, 1000]


def test_at_another_level_the_excess_waits() -> None:
    recorded = make_signals(0.0, used=1400, level=1)
    seen = as_seen_at(recorded, 0, [0, 500])
    assert (seen.level, seen.capacity_pages, seen.used_pages) == (0, 1000, 1000)
    assert (seen.waiting, seen.waiting_tokens, seen.admission_blocked) == (1, 400, True)
    assert as_seen_at(recorded, 1, [0, 500]) is recorded


def test_a_restore_that_would_not_fit_is_put_off() -> None:
    rows = [row_of(make_signals(i / 10, used=1100, level=2)) for i in range(100)]
    (run,) = runs_of(rows, top_level=2)
    spec = parse_spec("slo:quality_budget=0,quality_burst_s=1")
    assert all(action.target > 0 for action in replay(run, spec).actions)


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(ReplayError, match="--morph-event-log"):
        runs_of([start()])
    with pytest.raises(ReplayError, match="not complete"):
        runs_of([{"kind": "signals", "time": 1.0, "now": 1.0}])
