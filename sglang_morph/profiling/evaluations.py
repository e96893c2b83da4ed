"""What a profile run has measured so far, kept in a file so that a killed run goes on.

The file has a line of JSON for each evaluation, appended as soon as it is known, behind a line
that says what is measured. A run that goes on takes the same decisions from the same numbers.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import msgspec


class _Header(msgspec.Struct, frozen=True, tag="profile"):
    fingerprint: str


class _Evaluation(msgspec.Struct, frozen=True, tag="evaluation"):
    variant: str
    kind: str
    chosen: tuple[int, ...]
    layer: int | None
    value: float
    layer_calls: int
    """Decoder layers computed until then, in all runs together."""
    seconds: float
    """Time spent until then, in all runs together."""


_Key = tuple[str, str, tuple[int, ...], int | None]


class Evaluations:
    """Values by variant, kind, the layers chosen before, and the layer."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Goes on with `path` if it was written for `fingerprint`, else begins anew."""
        self._values: dict[_Key, float] = {}
        self._layer_calls_before = 0
        self._seconds_before = 0.0
        self._began = time.monotonic()
        intact = self._read(path, fingerprint)
        if not intact:
            path.write_bytes(msgspec.json.encode(_Header(fingerprint)) + b"\n")
        else:
            os.truncate(path, intact)  # a killed run may have left half a line
        self._file = path.open("ab")

    def __len__(self) -> int:
        return len(self._values)

    def get(
        self, variant: str, kind: str, chosen: tuple[int, ...], layer: int | None
    ) -> float | None:
        return self._values.get((variant, kind, chosen, layer))

    def put(
        self,
        variant: str,
        kind: str,
        chosen: tuple[int, ...],
        layer: int | None,
        value: float,
        layer_calls: int,
    ) -> None:
        """`layer_calls` of this run so far. Raises ValueError for a value that is not finite."""
        if not math.isfinite(value):
            raise ValueError(
                f"layer {layer} in {variant} yields {value}; the checkpoint is damaged, or the "
                "variant does not suit it"
            )
        self._values[variant, kind, chosen, layer] = value
        line = _Evaluation(
            variant,
            kind,
            chosen,
            layer,
            value,
            self.layer_calls(layer_calls),
            self.seconds,
        )
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def layer_calls(self, now: int) -> int:
        """Of all runs, when this one has made `now`."""
        return self._layer_calls_before + now

    @property
    def seconds(self) -> float:
        """Time of all runs, from the beginning of each to its last evaluation."""
        return self._seconds_before + time.monotonic() - self._began

    def close(self) -> None:
        self._file.close()

    def _read(self, path: Path, fingerprint: str) -> int:
        """Length of the part that can be used; 0 if the file is for something else."""
        if not path.exists():
            return 0
        intact = 0
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                found = msgspec.json.decode(line, type=_Header | _Evaluation)
            except msgspec.MsgspecError:
                break
            if not line.endswith(b"\n"):
                break
            if not self._take(found, fingerprint, first=intact == 0):
                return 0
            intact += len(line)
        return intact

    def _take(self, found: _Header | _Evaluation, fingerprint: str, *, first: bool) -> bool:
        if isinstance(found, _Header):
            return first and found.fingerprint == fingerprint
        self._values[found.variant, found.kind, found.chosen, found.layer] = found.value
        self._layer_calls_before, self._seconds_before = found.layer_calls, found.seconds
        return not first
