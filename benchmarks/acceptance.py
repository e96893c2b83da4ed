"""The measured numbers the project stands by: `benchmarks/results/acceptance.json`.

A list of rows, one per name, in order of name. A new measurement replaces the row of its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

RESULTS = Path(__file__).parent / "results"
ACCEPTANCE = RESULTS / "acceptance.json"


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number with its bar and its origin."""

    name: str
    """Area and what, for example `layer_swap.level0.tpot_ratio.bs64`."""
    value: float | int | str | bool
    unit: str
    """Empty for a plain number or a yes/no."""
    bar: str
    """What the value must satisfy, readable: `>= 40`, `is true`; empty where none is set."""
    holds: bool
    """Whether the value satisfies the bar."""
    command: str
    commit: str
    date: str
    """ISO 8601."""
    hardware: str
    raw: str = ""
    """Path of the raw data from the project's root; empty where there is none."""


def load(path: Path) -> list[Row]:
    """All rows. Raises `msgspec.ValidationError` where the file breaks the schema."""
    if not path.exists():
        return []
    return msgspec.json.decode(path.read_bytes(), type=list[Row])


def upsert(rows: Iterable[Row], path: Path) -> None:
    """Add `rows`, each replacing the row of the same name. The file is replaced as a whole."""
    merged = {row.name: row for row in load(path)} | {row.name: row for row in rows}
    ordered = [merged[name] for name in sorted(merged)]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=2) + b"\n")
    scratch.replace(path)
