"""Prometheus metrics of the scheduler process, on SGLang's own `/metrics`.

SGLang runs prometheus-client in multiprocess mode: each process writes its values into files under
`PROMETHEUS_MULTIPROC_DIR`, and the HTTP process gathers them. So prometheus-client must not be
imported before SGLang has set that variable, which is why `MorphMetrics` imports it late.

Every name starts with `sglang_morph:`, since a hyphen is not legal in a Prometheus name. Gauges in
tokens count KV pages of one token, the only page size there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_morph.controller.signals import Signals
from sglang_morph.observability.records import TransitionRecord

PREFIX = "sglang_morph:"

GAUGES: dict[str, str] = {
    "precision_level": "Precision level now; 0 is full precision.",
    "layers_lowered": "Decoder layers that are not at full precision.",
    "kv_capacity_tokens": "Tokens the KV cache can hold now.",
    "kv_base_tokens": "Tokens the KV cache can hold with nothing lent.",
    "kv_lent_tokens": "Tokens held in memory lent by weights.",
    "kv_used_tokens": "Tokens of KV cache that requests hold.",
    "kv_evictable_tokens": "Cached tokens that no request holds.",
    "host_bytes": "Bytes of host memory kept for weights: backups and variants.",
}

TRANSITION_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Upper bounds of the buckets: a GPU converts a layer in 1 ms, a CPU a model in up to 30 s."""


class _Gauge:
    """A gauge that is written only when its value changes."""

    __slots__ = ("_child", "_value")

    def __init__(self, child: Any) -> None:
        self._child = child
        self._value: float | None = None

    def set(self, value: float) -> None:
        if value != self._value:
            self._child.set(value)
            self._value = value


class MorphMetrics:
    """The metrics, with one fixed set of label values. Create at most one a process."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        names = tuple(labels)
        self._labels = dict(labels)
        self._gauges = {
            name: _Gauge(
                Gauge(PREFIX + name, text, names, multiprocess_mode="mostrecent").labels(**labels)
            )
            for name, text in GAUGES.items()
        }
        self._transitions = Counter(
            PREFIX + "transitions_total",
            "Transitions by levels and result.",
            (*names, "from_level", "to_level", "result"),
        )
        self._rollbacks = Counter(
            PREFIX + "rollbacks_total", "Transitions that failed and were undone.", names
        ).labels(**labels)
        self._retractions_avoided = Counter(
            PREFIX + "retractions_avoided_total",
            "Times memory was lent in place of retracting a request.",
            names,
        ).labels(**labels)
        self._pages_migrated = Counter(
            PREFIX + "pages_migrated_total", "KV pages moved off lent memory.", names
        ).labels(**labels)
        self._seconds = Histogram(
            PREFIX + "transition_seconds",
            "Duration of a transition's phase: lower, reclaim or restore.",
            (*names, "phase"),
            buckets=TRANSITION_SECONDS,
        )

    @classmethod
    def create(cls, enabled: bool, labels: Mapping[str, str]) -> MorphMetrics | None:
        """The metrics if SGLang's are `enabled`, labelled as SGLang labels its own."""
        return cls(labels) if enabled else None

    def update(self, signals: Signals, layers_lowered: int, host_bytes: int) -> None:
        """Bring the gauges up to date. Cheap enough for every tick."""
        gauges = self._gauges
        gauges["precision_level"].set(signals.level)
        gauges["layers_lowered"].set(layers_lowered)
        gauges["kv_capacity_tokens"].set(signals.capacity_pages)
        gauges["kv_base_tokens"].set(signals.base_pages)
        gauges["kv_lent_tokens"].set(signals.capacity_pages - signals.base_pages)
        gauges["kv_used_tokens"].set(signals.used_pages)
        gauges["kv_evictable_tokens"].set(signals.evictable_pages)
        gauges["host_bytes"].set(host_bytes)

    def transition(self, record: TransitionRecord) -> None:
        """Count `record`, and its time unless nothing came of it."""
        outcome = record.outcome
        self._transitions.labels(
            **self._labels,
            from_level=str(outcome.from_level),
            to_level=str(outcome.to_level),
            result=outcome.result,
        ).inc()
        if outcome.result == "rolled_back":
            self._rollbacks.inc()
        self._pages_migrated.inc(outcome.pages_migrated)
        if outcome.result in ("started", "completed"):
            self._seconds.labels(**self._labels, phase=record.phase).observe(outcome.duration_s)

    def retraction_avoided(self) -> None:
        self._retractions_avoided.inc()
