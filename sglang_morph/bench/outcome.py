"""What became of one request, as rows of a parquet file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]


@dataclass(slots=True)
class Outcome:
    """Times are seconds since the replay's start, or durations.

    Latencies count from `at_s`, when the request was due, not from when it was sent: a replayer
    that is late can't make the server look faster.
    """

    index: int
    at_s: float
    input_tokens: int
    wanted_tokens: int
    session: str | None = None
    sent_s: float | None = None
    """When its last byte was handed to the socket."""
    connect_s: float = 0.0
    """Time until the server took a new connection; 0 where an open one was used."""
    prompt_tokens: int = 0
    """As the server counts them."""
    output_tokens: int = 0
    arrivals_s: list[float] = field(default_factory=list)
    """When output tokens came."""
    arrival_tokens: list[int] = field(default_factory=list)
    """How many came each time."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was in the cache."""
    queue_s: float | None = None
    """Time in the server's queue, where the server tells."""
    retractions: int = 0
    generated_by_level: list[int] | None = None
    """Output tokens by the precision level they were computed at, where the server tells."""
    prefilled_by_level: list[int] | None = None
    """Prompt tokens computed, likewise; those of a retracted request are computed again."""
    reused_lowered: int | None = None
    """Prompt tokens taken from the cache that were computed below full precision."""
    text: str = ""
    error: str | None = None

    def arrived(self, now_s: float, total_tokens: int) -> None:
        """Note that `total_tokens` have come by now; nothing new is no arrival."""
        new = total_tokens - self.output_tokens
        if new > 0:
            self.arrivals_s.append(now_s)
            self.arrival_tokens.append(new)
            self.output_tokens = total_tokens

    @property
    def ok(self) -> bool:
        """All tokens asked for have come, and no error."""
        return self.error is None and self.output_tokens == self.wanted_tokens

    @property
    def lateness_s(self) -> float | None:
        """The replayer's own: waiting for the server to take a connection is not in it."""
        return None if self.sent_s is None else self.sent_s - self.connect_s - self.at_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.arrivals_s[0] - self.at_s if self.arrivals_s else None

    @property
    def latency_s(self) -> float | None:
        """Time to last token."""
        return self.arrivals_s[-1] - self.at_s if self.arrivals_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between two arrivals, however many tokens each brought: what a reader waits."""
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]

    @property
    def itls_s(self) -> list[float]:
        """A gap per token after the first arrival: a gap before n tokens counts n times gap/n."""
        pairs = zip(self.gaps_s, self.arrival_tokens[1:], strict=True)
        return [gap / tokens for gap, tokens in pairs for _ in range(tokens)]

    @property
    def max_gap_s(self) -> float | None:
        return max(self.gaps_s, default=None)


_SCHEMA = pa.schema(
    [
        ("index", pa.int32()),
        ("at_s", pa.float64()),
        ("input_tokens", pa.int32()),
        ("wanted_tokens", pa.int32()),
        ("session", pa.string()),
        ("sent_s", pa.float64()),
        ("connect_s", pa.float64()),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("arrivals_s", pa.list_(pa.float64())),
        ("arrival_tokens", pa.list_(pa.int32())),
        ("cached_tokens", pa.int32()),
        ("queue_s", pa.float64()),
        ("retractions", pa.int32()),
        ("generated_by_level", pa.list_(pa.int32())),
        ("prefilled_by_level", pa.list_(pa.int32())),
        ("reused_lowered", pa.int32()),
        ("text", pa.string()),
        ("error", pa.string()),
    ]
)


def write_outcomes(path: Path, outcomes: Sequence[Outcome]) -> None:
    columns = {name: [getattr(outcome, name) for outcome in outcomes] for name in _SCHEMA.names}
    pq.write_table(pa.table(columns, schema=_SCHEMA), path, compression="zstd")


def read_outcomes(path: Path) -> list[Outcome]:
    return [Outcome(**row) for row in pq.read_table(path).to_pylist()]
