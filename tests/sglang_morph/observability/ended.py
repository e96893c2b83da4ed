from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_morph.observability.records import TransitionRecord


def ended(record: TransitionRecord, **fields: Any) -> TransitionRecord:
    """`record` with other `fields` of its outcome."""
    return replace(record, outcome=replace(record.outcome, **fields))
