"""What one replay leaves behind: a row, its requests, and what was seen of the server meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from sglang_morph.bench.outcome import Outcome, read_outcomes, write_outcomes
from sglang_morph.bench.statistics import append_row, read_rows
from sglang_morph.demo.samples import Sample


@dataclass(frozen=True, slots=True)
class Observed:
    """The server during one replay."""

    started: float
    """UNIX seconds of the replay's time 0."""
    samples: list[Sample]
    transitions: list[dict[str, Any]]
    """Completed level changes, as in the event log."""
    retracted: int
    """Requests that lost their KV pages and had to start again, by the server's counter."""
    tokens_by_level: dict[int, int]


@dataclass(frozen=True, slots=True)
class Record:
    row: dict[str, Any]
    outcomes: list[Outcome]
    observed: Observed


def write_record(folder: Path, name: str, record: Record) -> None:
    """Write `NAME.jsonl`, `NAME.requests.parquet` and `NAME.server.json` into `folder`."""
    row = folder / f"{name}.jsonl"
    row.unlink(missing_ok=True)
    append_row(row, record.row)
    write_outcomes(folder / f"{name}.requests.parquet", record.outcomes)
    observed = orjson.dumps(asdict(record.observed), option=orjson.OPT_NON_STR_KEYS)
    (folder / f"{name}.server.json").write_bytes(observed)


def has_record(folder: Path, name: str) -> bool:
    """Whether `write_record` got to its end."""
    return (folder / f"{name}.server.json").exists()


def read_record(folder: Path, name: str) -> Record:
    raw = orjson.loads((folder / f"{name}.server.json").read_bytes())
    observed = Observed(
        started=raw["started"],
        samples=[Sample(**sample) for sample in raw["samples"]],
        transitions=raw["transitions"],
        retracted=raw["retracted"],
        tokens_by_level={int(level): count for level, count in raw["tokens_by_level"].items()},
    )
    return Record(
        row=read_rows(folder / f"{name}.jsonl")[-1],
        outcomes=read_outcomes(folder / f"{name}.requests.parquet"),
        observed=observed,
    )


def kv_pressure(observed: Sequence[Sample], until: float) -> dict[str, float | None]:
    """Whether KV pages were what was short: peak use, and the share of samples near it or queueing.

    Use is that of requests alone; cached prefixes can be evicted. Samples after `until` (UNIX
    seconds), when the last answer had come, don't count.
    """
    samples = [sample for sample in observed if sample.time <= until]
    if not samples:
        return {"peak_use": None, "share_above_90": None, "share_waiting": None}
    uses = [sample.used / sample.capacity for sample in samples if sample.capacity]
    return {
        "peak_use": max(uses, default=None),
        "share_above_90": sum(use > 0.9 for use in uses) / len(uses) if uses else None,
        "share_waiting": sum(sample.waiting > 0 for sample in samples) / len(samples),
    }
