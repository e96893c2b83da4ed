"""How fast a server is at each precision level, as measured: what the simulation runs on."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

SCHEMA_VERSION = 1
SHIPPED = Path(__file__).parent / "profiles"

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]


class ProfileError(ValueError):
    """A profile can't be used. The message is one line with cause and remedy."""


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds over `x`, a line between two points; the last two points' line goes on beyond."""

    x: list[_NotNegative]
    seconds: list[_Positive]

    def __post_init__(self) -> None:
        if len(self.x) < 2 or len(self.x) != len(self.seconds):
            raise ValueError("a curve needs two points or more, and a time for each")
        if any(after <= before for before, after in pairwise(self.x)):
            raise ValueError("a curve's x must rise strictly")

    def at(self, x: float) -> float:
        """Seconds at `x`; below the first point those of the first point."""
        if x <= self.x[0]:
            return self.seconds[0]
        right = min(bisect_right(self.x, x), len(self.x) - 1)
        left = right - 1
        slope = (self.seconds[right] - self.seconds[left]) / (self.x[right] - self.x[left])
        return max(self.seconds[left] + slope * (x - self.x[left]), self.seconds[0])


class LevelProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One precision level. `lower_s` and `restore_s` count from and to level 0."""

    name: str
    lent_pages: Annotated[int, msgspec.Meta(ge=0)]
    prefill: Curve
    """Seconds of a prefill batch over its tokens."""
    decode: Curve
    """Seconds of a decode step over the requests in it, at short contexts."""
    decode_context_s: _NotNegative = 0.0
    """Seconds that each KV token in the batch adds to a decode step."""
    lower_s: _NotNegative = 0.0
    """Seconds the scheduler stands still to get here from level 0."""
    restore_s: _NotNegative = 0.0
    """Seconds of work, spread over scheduler steps, to get from here to level 0."""


class ServerProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server on one machine, with one model. A page holds one token."""

    schema_version: int
    name: str
    source: str
    """What was measured, how, and what was derived."""
    hardware: str
    model: str
    base_pages: _Count
    max_running: _Count
    chunk_tokens: _Count
    """Most tokens of one prefill batch (SGLang's `--chunked-prefill-size`)."""
    request_overhead_s: _NotNegative
    """Part of the time to first token that passes outside the scheduler."""
    levels: Annotated[list[LevelProfile], msgspec.Meta(min_length=1)]
    results_late: bool = False
    """Whether a step's tokens are handed out only once the next step is done: SGLang's overlap
    scheduling where launching a step is computing it, on a CPU.
    """

    def __post_init__(self) -> None:
        if self.levels[0].lent_pages:
            raise ValueError("level 0 lends nothing: its lent_pages must be 0")
        for name in ("lent_pages", "lower_s", "restore_s"):
            values = [getattr(level, name) for level in self.levels]
            if values != sorted(values):
                raise ValueError(f"{name} must not fall from one level to the next")

    @property
    def top_level(self) -> int:
        return len(self.levels) - 1

    def capacity(self, level: int) -> int:
        """KV pages that exist at `level`."""
        return self.base_pages + self.levels[level].lent_pages

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def shipped_profiles() -> list[str]:
    """Names `load_profile` takes besides paths."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def load_profile(name_or_path: str) -> ServerProfile:
    """A shipped profile by name, or a file. Raises `ProfileError`."""
    shipped = SHIPPED / f"{name_or_path}.json"
    path = shipped if shipped.is_file() else Path(name_or_path)
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=ServerProfile)
    except OSError as error:
        raise ProfileError(
            f"profile {name_or_path} can't be read ({error.strerror}); give a JSON file or one of "
            f"{', '.join(shipped_profiles())}"
        ) from error
    except msgspec.DecodeError as error:
        raise ProfileError(f"profile {name_or_path}: {error}; measure it again") from error
    if profile.schema_version != SCHEMA_VERSION:
        raise ProfileError(
            f"profile {name_or_path} has schema version {profile.schema_version}, this program "
            f"reads {SCHEMA_VERSION}; measure it again"
        )
    return profile
