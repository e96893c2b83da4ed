"""Several policies over the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from sglang_morph.bench.traces import TraceRequest, read_trace
from sglang_morph.bench.window import Scaling, cut, densest, scale
from sglang_morph.policy_cli.profile import ServerProfile
from sglang_morph.policy_cli.simulation import DEFAULT_TICK_S, Outcome, Simulation
from sglang_morph.policy_cli.spec import PolicySpec
from sglang_morph.policy_cli.tables import Slo, Summary, summarize

_POINTS = 4000
"""Of a picture's timeline, about."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Which requests of a trace, and how they are scaled."""

    trace: Path
    start_s: float = 0.0
    seconds: float | None = None
    densest: bool = False
    rate: float | None = None
    """Requests a second; None keeps the trace's."""
    scaling: Scaling = "stretch"
    token_factor: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """One policy's outcome."""

    summary: Summary
    outcome: Outcome


def load_requests(workload: Workload) -> tuple[list[TraceRequest], str]:
    """The requests, and a note on them for the table's title. Raises ValueError."""
    if workload.densest and workload.seconds is None:
        raise ValueError("--densest needs --seconds, the length of the window")
    if not workload.token_factor > 0:
        raise ValueError(f"--token-factor is {workload.token_factor}: give a number above 0")
    trace = read_trace(workload.trace)
    if workload.densest and workload.seconds is not None:
        window = densest(trace.requests, workload.seconds)
    else:
        window = cut(trace.requests, workload.start_s, workload.seconds)
    if workload.rate is not None:
        window = scale(window, workload.rate / window.rate, workload.scaling, workload.seed)
    requests = [_resized(request, workload.token_factor) for request in window.requests]
    left_out = sum(trace.skipped.values())
    note = f"{len(requests):,} requests at {window.rate:.2f}/s"
    return requests, note + (f", {left_out} rows left out" if left_out else "")


def _resized(request: TraceRequest, factor: float) -> TraceRequest:
    return replace(
        request,
        input_tokens=max(1, round(request.input_tokens * factor)),
        output_tokens=max(1, round(request.output_tokens * factor)),
    )


def run_trials(
    profile: ServerProfile,
    specs: Sequence[PolicySpec],
    requests: Sequence[TraceRequest],
    slo: Slo,
    tick_s: float = DEFAULT_TICK_S,
    record: bool = False,
) -> list[Trial]:
    """Every policy over the same requests. Raises `SpecError`."""
    record_s = (requests[-1].at_s + 1.0) / _POINTS if record else inf
    trials = []
    for spec in specs:
        simulation = Simulation(
            profile,
            spec.create(profile.top_level),
            requests,
            level=spec.first_level(profile.top_level),
            tick_s=tick_s,
            percentile=spec.options.slo_percentile,
            record_s=record_s,
        )
        outcome = simulation.run()
        trials.append(Trial(summarize(spec.label, outcome, slo), outcome))
    return trials
