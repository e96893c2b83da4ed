"""Reads request traces: when each request arrived, and its token counts. The format is sniffed.

| format | first line |
|---|---|
| `azure` (2023 and 2024) | `TIMESTAMP,ContextTokens,GeneratedTokens` |
| `burstgpt` (with and without sessions) | `Timestamp,...,Request tokens,Response tokens,...` |
| `mooncake` | a JSON object with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` |
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

_ZERO_TOKENS = "zero tokens"
_DAMAGED = "damaged"


class TraceError(ValueError):
    """A trace that can't be read. The message has the file, the line and the remedy."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float
    """Seconds since the first request of the trace."""
    input_tokens: int
    output_tokens: int
    session: str | None = None
    """Requests of one session continue each other; None where the trace doesn't tell."""
    blocks: tuple[int, ...] = ()
    """Ids of 512-token blocks of the prompt (Mooncake); equal ids are equal text."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, and what was done to get there."""

    format: str
    requests: list[TraceRequest]
    skipped: dict[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""
    out_of_order: int = 0
    """Rows that were earlier than the row before them; they have been sorted in."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A row whose time is not yet relative to the first."""

    time_s: float
    input_tokens: int
    output_tokens: int
    session: str | None = None
    blocks: tuple[int, ...] = ()


Parser = Callable[[Any], _Row]
"""Raises ValueError, KeyError, IndexError or TypeError for a damaged row."""


def read_trace(path: Path, skip_damaged: bool = False) -> Trace:
    """Read a trace, gzipped if its name ends in `.gz`.

    Requests without input or output tokens (in BurstGPT: failed ones) are left out and counted.
    Raises `TraceError` for a file that is no trace, and for a damaged row unless `skip_damaged`,
    with which it is counted as well.
    """
    text = _read_text(path)
    first = text.lstrip().split("\n", 1)[0]
    if not first:
        raise TraceError(f"{path} is empty; give a trace with a header and at least one request")
    if first.startswith("{"):
        return _collect(path, "mooncake", _json_rows(text), _mooncake, skip_damaged)
    header = [name.strip() for name in next(csv.reader([first]))]
    name, parse = _csv_parser(path, header)
    return _collect(path, name, _csv_rows(path, text), parse, skip_damaged)


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: {error}; give a file that can be read") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(f"{path}, line {line}: not UTF-8; convert the file") from error


def _json_rows(text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Rows after the header, with the number of their last line. Blank lines are passed over."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    seen_header = False
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise TraceError(f"{path}, line {reader.line_num}: {error}; mend the file") from error
        if not row:
            continue
        if seen_header:
            yield reader.line_num, row
        seen_header = True


def _csv_parser(path: Path, header: Sequence[str]) -> tuple[str, Parser]:
    columns = {name: position for position, name in enumerate(header)}
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= columns.keys():
        return "azure", lambda row: _azure(row, columns)
    if {"Timestamp", "Request tokens", "Response tokens"} <= columns.keys():
        return "burstgpt", lambda row: _burstgpt(row, columns)
    raise TraceError(
        f"{path}, line 1: unknown columns {', '.join(header)!r}; "
        "known are Azure 2023 and 2024, BurstGPT and Mooncake traces"
    )


def _azure(row: Sequence[str], columns: dict[str, int]) -> _Row:
    _check_width(row, columns)
    return _Row(
        _seconds(row[columns["TIMESTAMP"]]),
        int(row[columns["ContextTokens"]]),
        int(row[columns["GeneratedTokens"]]),
    )


def _burstgpt(row: Sequence[str], columns: dict[str, int]) -> _Row:
    _check_width(row, columns)
    session = row[columns["Session ID"]].strip() if "Session ID" in columns else ""
    return _Row(
        float(row[columns["Timestamp"]]),
        int(row[columns["Request tokens"]]),
        int(row[columns["Response tokens"]]),
        session or None,
    )


def _check_width(row: Sequence[str], columns: dict[str, int]) -> None:
    if len(row) != len(columns):
        raise ValueError(f"{len(row)} fields where the header has {len(columns)}")


def _mooncake(line: str) -> _Row:
    values = orjson.loads(line)
    counts = values["input_length"], values["output_length"]
    if any(type(count) is not int for count in counts):
        raise ValueError("token counts must be integers")
    blocks = values.get("hash_ids", ())
    return _Row(float(values["timestamp"]) / 1000.0, *counts, blocks=tuple(map(int, blocks)))


_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")


def _seconds(stamp: str) -> float:
    """UNIX seconds of a wall-clock stamp with any number of digits; without a zone it is UTC."""
    match = _STAMP.fullmatch(stamp.strip())
    if match is None:
        raise ValueError(f"{stamp!r} is no time stamp")
    whole, fraction, zone = match.groups()
    moment = datetime.fromisoformat(whole + ("+00:00" if zone in (None, "Z") else zone))
    return moment.astimezone(timezone.utc).timestamp() + float(fraction or 0)


def _collect(
    path: Path, name: str, rows: Iterator[tuple[int, Any]], parse: Parser, skip_damaged: bool
) -> Trace:
    kept: list[_Row] = []
    skipped: Counter[str] = Counter()
    for number, raw in rows:
        try:
            row = _checked(parse(raw))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            if not skip_damaged:
                raise TraceError(
                    f"{path}, line {number}: {_reason(error)}; mend the line or skip damaged rows"
                ) from error
            skipped[_DAMAGED] += 1
            continue
        if row.input_tokens == 0 or row.output_tokens == 0:
            skipped[_ZERO_TOKENS] += 1
        else:
            kept.append(row)
    if not kept:
        raise TraceError(f"{path}: no request with tokens in it (left out: {dict(skipped)})")
    return _relative(name, kept, dict(skipped))


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _checked(row: _Row) -> _Row:
    if not math.isfinite(row.time_s):
        raise ValueError(f"time {row.time_s} is not a number of seconds")
    if row.input_tokens < 0 or row.output_tokens < 0:
        raise ValueError("a token count is negative")
    return row


def _relative(name: str, rows: Sequence[_Row], skipped: dict[str, int]) -> Trace:
    out_of_order = sum(later.time_s < earlier.time_s for earlier, later in pairwise(rows))
    ordered = sorted(rows, key=lambda row: row.time_s)
    start = ordered[0].time_s
    requests = [
        TraceRequest(
            row.time_s - start, row.input_tokens, row.output_tokens, row.session, row.blocks
        )
        for row in ordered
    ]
    return Trace(name, requests, skipped, out_of_order)
