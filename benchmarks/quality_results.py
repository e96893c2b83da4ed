"""What `benchmarks.quality` compares, and the file in which it keeps what it found."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from benchmarks.acceptance import RESULTS
from sglang_morph.quality.results import ContinuationResult, LevelResult, Settings, TextResult

RAW = RESULTS / "quality_smollm2.json"

LEVELS = {"quarter": 0.25, "half": 0.5, "all": 1.0}
"""Name -> share of the layers that is lowered."""
ALL = "all"
ANY = "any"
"""Order of a cell in which all layers are lowered."""

SEEDS = (0, 1, 2)
FIXED = ("front", "back", *(f"random {seed}" for seed in SEEDS))
SEARCHED = ("lis", "kl", "contiguous")
ORDERS = (*FIXED, *SEARCHED)
DEFAULT_ORDER = "front"


@dataclass(frozen=True, slots=True)
class Arm:
    """A variant as one quantizer makes it."""

    name: str
    variant: str
    quantizer: str
    searched_in: str
    """Arm whose searched orders it takes: searching in every arm would take too long."""


ARMS = (
    Arm("fp8", "fp8", "rtn", "fp8"),
    Arm("nested_fp8", "nested_fp8", "rtn", "fp8"),
    Arm("int8", "int8", "rtn", "fp8"),
    Arm("int4 rtn", "int4", "rtn", "int4 rtn"),
    Arm("int4 awq", "int4", "awq", "int4 awq"),
    Arm("int4 gptq", "int4", "gptq", "int4 awq"),
    Arm("int3 rtn", "int3", "rtn", "int4 rtn"),
    Arm("int3 awq", "int3", "awq", "int4 awq"),
)
ALTERNATING = ("fp8", "int4 rtn", "int4 awq")
"""Arms in which the level also changes in the middle of responses, half of the layers lowered."""


class Cell(msgspec.Struct, frozen=True):
    """An arm with some of its layers lowered."""

    arm: str
    order: str
    level: str
    layers: list[int]
    freed_bytes: int
    text: TextResult
    continuations: ContinuationResult | None
    """Of the default order only."""


class Found(msgspec.Struct):
    """Grows cell by cell."""

    settings: Settings
    provenance: dict[str, str]
    full: LevelResult
    orders: dict[str, dict[str, list[int]]]
    """Arm that was searched in -> order -> layers."""
    cells: list[Cell]
    alternating: list[LevelResult]
    """Their `plan` is the arm."""
    origins: dict[str, dict[str, str]] = {}
    """Arm -> its own provenance, where it was measured later than the rest."""

    def forget(self, arm: str) -> None:
        """Of an arm, its orders too."""
        self.cells = [cell for cell in self.cells if cell.arm != arm]
        self.alternating = [result for result in self.alternating if result.plan != arm]
        self.orders.pop(arm, None)

    def cell(self, arm: str, order: str, level: str) -> Cell | None:
        wanted = (arm, ANY if level == ALL else order, level)
        return next((c for c in self.cells if (c.arm, c.order, c.level) == wanted), None)

    def save(self) -> None:
        scratch = RAW.with_suffix(".tmp")
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        scratch.replace(RAW)


def read_found(settings: Settings) -> Found | None:
    """What was found with the same settings."""
    if not RAW.exists():
        return None
    found = msgspec.json.decode(RAW.read_bytes(), type=Found)
    return found if found.settings == settings else None
