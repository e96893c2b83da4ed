"""A running server that workloads are replayed against, watched while they run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_morph.bench.exposure import full_precision_share, level_changes, tokens_by_level
from sglang_morph.bench.prompts import count_tokens
from sglang_morph.bench.record import Observed, Record, kv_pressure
from sglang_morph.bench.replay import Finished, Replay, replay, run_loop
from sglang_morph.bench.routes import Route
from sglang_morph.bench.server_control import (
    NotSettled,
    flush,
    memory_of,
    server_info,
    wait_for_level,
)
from sglang_morph.bench.statistics import Slo, replay_row
from sglang_morph.bench.workload import Workload
from sglang_morph.demo.model_shape import ModelShape
from sglang_morph.demo.samples import MetricsSampler, morph_samples, static_samples
from sglang_morph.observability.event_log import read_events

_GIB = 2**30
_RETRACTED = "sglang:num_retracted_requests_total"
_REST_S = 1.0
"""Watched after the last answer, so that plots show the server at rest."""


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """`event_log` is None for a server that doesn't morph, or whose log is out of reach."""

    url: str
    route: Route
    model: Path
    """Folder of the tokenizer."""
    event_log: Path | None
    settle_timeout_s: float
    drain_timeout_s: float
    level: int = 0
    """Precision level at which it rests."""
    weights_gib: float | None = None
    """Of its weights, where that is known better than by its own word."""
    alone: bool = True
    """Whether it loaded with no other server beside it."""

    def memory(self, info: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """`memory_of`, without `weight` where nobody knows it."""
        memory = memory_of(info)
        if memory is None or info is None:
            return memory
        if self.weights_gib is not None:
            return {**memory, "weight": self.weights_gib}
        if self.alone or info.get("device") == "cpu":
            return memory
        return {key: value for key, value in memory.items() if key != "weight"}

    def settle(self) -> None:
        """Bring it to rest: idle, at its level, with nothing cached. Raises `NotSettled`."""
        if self.event_log is not None:
            wait_for_level(self.url, self.level, self.settle_timeout_s)
        flush(self.url, self.settle_timeout_s)

    def send(self, workload: Workload) -> Replay:
        """Replay without watching: for warm-up."""
        return run_loop(replay(self.url, self.route, workload, self.drain_timeout_s))

    def measure(
        self, workload: Workload, slo: Slo, tag: str, finished: Finished = lambda outcome: None
    ) -> Record:
        """Replay `workload`, and sum up what came and what the server did."""
        info = server_info(self.url)
        replayed, sampler = run_loop(self._watched(workload, finished))
        observed = self._observed(replayed, sampler, info)
        row = {
            "tag": tag,
            "backend": self.route.name,
            "dataset_name": workload.name,
            **replay_row(replayed, workload, slo),
            "total_output_tokens_retokenized": count_tokens(
                self.model, [outcome.text for outcome in replayed.outcomes if outcome.ok]
            ),
            "server_info": info,
            "retracted_by_server": observed.retracted,
            "transitions": len(observed.transitions),
            "tokens_by_level": {str(k): v for k, v in observed.tokens_by_level.items()},
            "full_precision_token_share": full_precision_share(observed.tokens_by_level),
            "kv": kv_pressure(observed.samples, replayed.started + replayed.duration_s),
        }
        return Record(row, replayed.outcomes, observed)

    async def _watched(
        self, workload: Workload, finished: Finished
    ) -> tuple[Replay, MetricsSampler]:
        sampler = MetricsSampler(self.url)
        sampling = asyncio.create_task(sampler.run())
        try:
            replayed = await replay(self.url, self.route, workload, self.drain_timeout_s, finished)
            await self._until_rest()
        finally:
            sampling.cancel()
        return replayed, sampler

    async def _until_rest(self) -> None:
        """So that what is observed ends with the server at rest, if it gets there in time."""
        await asyncio.sleep(_REST_S)
        if self.event_log is not None:
            waiting = asyncio.to_thread(wait_for_level, self.url, self.level, self.settle_timeout_s)
            try:
                await waiting
            except (NotSettled, httpx.HTTPError):
                pass  # Whoever goes on with this server will find out by `settle`.

    def _observed(
        self, replayed: Replay, sampler: MetricsSampler, info: Mapping[str, Any] | None
    ) -> Observed:
        started, now = replayed.started, time.time()
        events = [] if self.event_log is None else read_events(self.event_log)
        transitions = [
            event
            for event in events
            if event["kind"] == "transition"
            and event["result"] == "completed"
            and started <= event["time"] <= now
        ]
        samples = (
            static_samples(sampler.readings, _shape(self.memory(info)))
            if self.event_log is None
            else morph_samples(events)
        )
        return Observed(
            started=started,
            samples=[sample for sample in samples if started <= sample.time <= now],
            transitions=transitions,
            retracted=_retracted(sampler),
            tokens_by_level=tokens_by_level(replayed.outcomes, started, level_changes(events)),
        )


def _shape(told: Mapping[str, Any] | None) -> ModelShape:
    """Sizes by what is known of a server's memory; zero where nothing is."""
    memory = told or {}
    capacity = memory.get("token_capacity") or 0
    return ModelShape(
        layer_weight_bytes=round(_GIB * memory.get("weight", 0.0)),
        page_bytes=round(_GIB * memory.get("kvcache", 0.0) / capacity) if capacity else 0,
    )


def _retracted(sampler: MetricsSampler) -> int:
    """Retractions during the replay: the counter is the server's since its start."""
    if not sampler.readings:
        return 0
    counts = [values.get(_RETRACTED, 0.0) for _, values in sampler.readings]
    return int(counts[-1] - counts[0])
