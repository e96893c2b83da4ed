"""Prometheus counters of requests: floors, and tokens by precision level.

See `metrics` for why prometheus-client is imported late. Written when a request ends, never per
token.
"""

from __future__ import annotations

from collections.abc import Mapping

from sglang_morph.controller.exposure import Exposure
from sglang_morph.observability.metrics import PREFIX


class RequestMetrics:
    """One fixed set of label values. Create at most one a process."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        from prometheus_client import Counter

        names = tuple(labels)
        self._labels = dict(labels)
        self._floors = Counter(
            PREFIX + "floor_requests_total",
            "Requests with a floor that were held, rejected, or served below it (ignored).",
            (*names, "result"),
        )
        self._tokens = Counter(
            PREFIX + "request_tokens_total",
            "Tokens of ended requests by the level they were computed at: generated or prefilled.",
            (*names, "phase", "level"),
        )
        self._reused = Counter(
            PREFIX + "reused_lowered_tokens_total",
            "Tokens taken from the prefix cache whose KV was computed below full precision.",
            names,
        ).labels(**labels)

    @classmethod
    def create(cls, enabled: bool, labels: Mapping[str, str]) -> RequestMetrics | None:
        """The metrics if SGLang's are `enabled`, labelled as SGLang labels its own."""
        return cls(labels) if enabled else None

    def floor(self, result: str) -> None:
        self._floors.labels(**self._labels, result=result).inc()

    def ended(self, exposure: Exposure) -> None:
        for phase, counts in (("generated", exposure.generated), ("prefilled", exposure.prefilled)):
            for level, tokens in counts.items():
                self._tokens.labels(**self._labels, phase=phase, level=str(level)).inc(tokens)
        if exposure.reused_lowered:
            self._reused.inc(exposure.reused_lowered)
