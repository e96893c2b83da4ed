"""One row of numbers about a replay, with the keys of `sglang.bench_serving` and some more."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from sglang_morph.bench.exposure import prefilled_by_level
from sglang_morph.bench.outcome import Outcome
from sglang_morph.bench.replay import Replay
from sglang_morph.bench.workload import Workload

_PERCENTILES = (("p50", 50.0), ("p90", 90.0), ("p95", 95.0), ("p99", 99.0), ("p99.9", 99.9))


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a request must keep to: first token in time, and no gap too long."""

    ttft_s: float = 2.0
    gap_factor: float = 5.0
    """Longest gap between tokens, in multiples of `base_tbt_s`."""
    base_tbt_s: float | None = None
    """Time between tokens of an unloaded server; None: gaps don't count."""

    @property
    def max_gap_s(self) -> float | None:
        return None if self.base_tbt_s is None else self.gap_factor * self.base_tbt_s

    def met(self, outcome: Outcome) -> bool:
        """A failed request never meets it."""
        ttft, gap, limit = outcome.ttft_s, outcome.max_gap_s, self.max_gap_s
        if not outcome.ok or ttft is None or ttft > self.ttft_s:
            return False
        return limit is None or gap is None or gap <= limit


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between ranks, as numpy's; NaN of nothing."""
    return float(np.percentile(values, percent)) if values else math.nan


def replay_row(replayed: Replay, workload: Workload, slo: Slo) -> dict[str, Any]:
    """The row but for what only the caller knows (`tag`, `backend`, `server_info`...).

    Latencies are those of completed requests, in ms; failed requests count as misses of the SLO.
    """
    outcomes = replayed.outcomes
    done = [outcome for outcome in outcomes if outcome.ok]
    duration = replayed.duration_s
    inputs = sum(outcome.prompt_tokens for outcome in done)
    outputs = sum(outcome.output_tokens for outcome in done)
    latencies = _known(outcome.latency_s for outcome in done)
    peak_tokens, peak_requests = _peaks(done)
    met = sum(slo.met(outcome) for outcome in outcomes)
    return {
        "request_rate": "trace",
        "max_concurrency": None,
        "duration": duration,
        "completed": len(done),
        "total_input_tokens": inputs,
        "total_input_text_tokens": inputs,
        "total_input_vision_tokens": 0,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "input_throughput": inputs / duration,
        "output_throughput": outputs / duration,
        "total_throughput": (inputs + outputs) / duration,
        **_distribution("e2e_latency_ms", latencies),
        **_distribution("ttft_ms", _known(outcome.ttft_s for outcome in done)),
        **_distribution("tpot_ms", _known(outcome.tpot_s for outcome in done)),
        **_distribution("itl_ms", [itl for outcome in done for itl in outcome.itls_s]),
        "concurrency": sum(latencies) / duration,
        "accept_length": None,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        # What bench_serving doesn't have.
        "requests": len(outcomes),
        "failed": len(outcomes) - len(done),
        "offered_rate": workload.rate,
        "arrival_window_s": workload.duration_s,
        "slo": {"ttft_s": slo.ttft_s, "max_gap_s": slo.max_gap_s},
        "slo_attainment": met / len(outcomes),
        "goodput": met / duration,
        "max_gap_ms": _ms(max(_known(o.max_gap_s for o in done), default=math.nan)),
        "queue_time_ms": _percentiles(_known(outcome.queue_s for outcome in done)),
        "lateness_ms": _percentiles(_known(outcome.lateness_s for outcome in outcomes)),
        "retractions": sum(outcome.retractions for outcome in outcomes),
        "cached_tokens": sum(outcome.cached_tokens for outcome in done),
        "reused_lowered_tokens": sum(outcome.reused_lowered or 0 for outcome in done),
        "prefilled_by_level": {str(k): v for k, v in prefilled_by_level(outcomes).items()},
        "prompt_length_mismatches": sum(o.prompt_tokens != o.input_tokens for o in done),
        "workload": {"name": workload.name, "digest": workload.digest, **workload.origin},
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _ms(seconds: float) -> float | None:
    """None for what there is no number of, since JSON has no NaN."""
    return None if math.isnan(seconds) else 1000.0 * seconds


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    found = {name: _ms(percentile(seconds, percent)) for name, percent in _PERCENTILES}
    return {**found, "max": _ms(max(seconds, default=math.nan))}


def _distribution(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles as `mean_NAME`, ..., `p99.9_NAME`, `max_NAME`."""
    mean, deviation = (
        (float(np.mean(seconds)), float(np.std(seconds))) if seconds else (math.nan, math.nan)
    )
    shape = _percentiles(seconds)
    return {
        f"mean_{name}": _ms(mean),
        f"median_{name}": shape.pop("p50"),
        f"std_{name}": _ms(deviation),
        **{f"{key}_{name}": value for key, value in shape.items()},
    }


def _peaks(done: Sequence[Outcome]) -> tuple[float, int]:
    """Most tokens, and most requests in flight, in any whole second since the first was due."""
    if not done:
        return 0.0, 0
    first = min(outcome.at_s for outcome in done)
    seconds = math.ceil(max(outcome.arrivals_s[-1] for outcome in done) - first) + 1
    tokens, in_flight = np.zeros(seconds), np.zeros(seconds, dtype=int)
    for outcome in done:
        for at_s, count in zip(outcome.arrivals_s, outcome.arrival_tokens, strict=True):
            tokens[int(at_s - first)] += count
        in_flight[int(outcome.at_s - first) : int(outcome.arrivals_s[-1] - first) + 1] += 1
    return float(tokens.max()), int(in_flight.max())


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """The per-request lists that `sglang.bench_serving --output-details` writes. Seconds."""
    return {
        "input_lens": [outcome.input_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens if outcome.ok else 0 for outcome in outcomes],
        "ttfts": [outcome.ttft_s or 0.0 for outcome in outcomes],
        "itls": [outcome.itls_s for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error or "" for outcome in outcomes],
    }


def append_row(path: Path, row: dict[str, Any]) -> None:
    with path.open("ab") as file:
        file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
