"""How memory, level and queue went over time, from what each kind of server offers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from sglang_morph.demo.model_shape import ModelShape

SCRAPE_INTERVAL_S = 0.5
"""A scrape keeps the HTTP process busy for some 40 ms: a shorter interval would slow the burst."""

_USED = "sglang:kv_used_tokens"
_CACHED = "sglang:kv_evictable_tokens"
_FREE = "sglang:kv_available_tokens"
_RUNNING = "sglang:num_running_reqs"
_WAITING = "sglang:num_queue_reqs"
_RETRACTED = "sglang:num_retracted_requests_total"
_WANTED = (_USED, _CACHED, _FREE, _RUNNING, _WAITING, _RETRACTED)


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of a server. A page is one token; bytes are those that can change owner."""

    time: float
    """UNIX seconds."""
    used: int
    """Pages that a request holds."""
    cached: int
    """Pages of cached prefixes that no request holds."""
    free: int
    running: int
    waiting: int
    level: int
    full_bytes: int
    """Decoder layers' weights at full precision."""
    lowered_bytes: int
    """Decoder layers' weights at lower precision."""

    @property
    def capacity(self) -> int:
        return self.used + self.cached + self.free


class MetricsSampler:
    """Reads a server's `/metrics` again and again, until cancelled."""

    def __init__(self, url: str) -> None:
        self.readings: list[tuple[float, dict[str, float]]] = []
        """UNIX seconds, and metrics by name; a metric not yet counted is missing."""
        self._url = url

    async def run(self) -> None:
        async with aiohttp.ClientSession(self._url) as session:
            while True:
                await self._scrape(session)
                await asyncio.sleep(SCRAPE_INTERVAL_S)

    async def _scrape(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.get("/metrics") as response:
                self.readings.append((time.time(), parse_metrics(await response.text())))
        except aiohttp.ClientError:
            pass  # A gap in the curve; a server that died shows as failed requests.

    @property
    def retractions(self) -> int:
        """Requests that SGLang took out of the running batch for want of KV pages."""
        return int(self.readings[-1][1].get(_RETRACTED, 0)) if self.readings else 0


def parse_metrics(text: str) -> dict[str, float]:
    """The wanted metrics of a Prometheus exposition, each summed over its label values."""
    lines = (line for line in text.splitlines() if line.startswith(_WANTED))
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def static_samples(
    readings: Iterable[tuple[float, Mapping[str, float]]], shape: ModelShape
) -> list[Sample]:
    """Samples of a server whose weights stay as they are; as fresh as SGLang's gauges."""
    return [
        Sample(
            time=now,
            used=int(values[_USED]),
            cached=int(values[_CACHED]),
            free=int(values[_FREE]),
            running=int(values[_RUNNING]),
            waiting=int(values[_WAITING]),
            level=0,
            full_bytes=shape.layer_weight_bytes,
            lowered_bytes=0,
        )
        for now, values in readings
        if _FREE in values
    ]


def morph_samples(rows: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """Samples of a morphing server, from the `signals` rows of its event log."""
    return [
        Sample(
            time=row["time"],
            used=row["used_pages"],
            cached=row["evictable_pages"],
            free=row["free_pages"],
            running=row["running"],
            waiting=row["waiting"],
            level=row["level"],
            full_bytes=row["bytes"]["full_weights"],
            lowered_bytes=row["bytes"]["variant_weights"],
        )
        for row in rows
        if row["kind"] == "signals"
    ]
