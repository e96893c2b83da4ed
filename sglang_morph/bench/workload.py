"""A workload: what is sent, when, with which prompts. Made once, the same for every arm."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from sglang_morph.bench.prompts import PromptMaker, Sharing
from sglang_morph.bench.traces import Trace, TraceRequest, read_trace
from sglang_morph.bench.window import Scaling, Window, WindowError, cut, densest, scale

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
"""Also names files."""


class WorkloadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a workload is made out of a trace, as written in a plan or on the command line."""

    name: Name
    trace: Path
    start_s: float = 0.0
    duration_s: float | None = None
    """Before scaling; None: to the trace's end."""
    densest: bool = False
    """Take the `duration_s` seconds with most requests instead of `start_s`."""
    rate: float | None = None
    """Requests a second wanted; None: as `factor` says."""
    factor: float | None = None
    """Rate over the trace's own."""
    scaling: Scaling = "stretch"
    token_factor: float = 1.0
    """Multiplies all token counts, for models much smaller than the trace's."""
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    """Longer ones are cut to this, and counted."""
    sharing: Sharing = "none"
    prefix_tokens: int = 0
    prefix_groups: int = 1
    skip_damaged: bool = False

    def __post_init__(self) -> None:
        if self.rate is not None and self.factor is not None:
            raise ValueError("give rate or factor, not both")
        if self.densest and self.duration_s is None:
            raise ValueError("densest needs duration_s")
        if self.densest and self.start_s:
            raise ValueError("give densest or start_s, not both")
        if self.duration_s is not None and not self.duration_s > 0:
            raise ValueError("duration_s must be above 0")
        if not self.token_factor > 0:
            raise ValueError("token_factor must be above 0")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to send `at_s` seconds after the start."""

    at_s: float
    input_ids: list[int]
    output_tokens: int
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: list[PlannedRequest]
    duration_s: float
    """Of the arrivals."""
    origin: dict[str, Any]
    """Trace, window, scaling, seed and what was left out or cut: enough to make it again."""

    @property
    def rate(self) -> float:
        """Requests a second offered."""
        return len(self.requests) / self.duration_s

    @property
    def digest(self) -> str:
        """SHA-256 over arrival times, prompts and output lengths."""
        sha = hashlib.sha256()
        for request in self.requests:
            sha.update(f"{request.at_s:.6f} {request.output_tokens} ".encode())
            sha.update(np.asarray(request.input_ids, dtype=np.int64).tobytes())
        return sha.hexdigest()


def make_workload(spec: WorkloadSpec, tokens: Sequence[int], seed: int) -> Workload:
    """Raises `TraceError`, `WindowError`, `PromptError`."""
    trace = read_trace(spec.trace, spec.skip_damaged)
    window = _scaled(spec, _window(spec, trace), seed)
    requests, cut_count = _fitted(spec, window.requests)
    maker = PromptMaker(tokens, seed, spec.sharing, spec.prefix_tokens, spec.prefix_groups)
    planned = [
        PlannedRequest(request.at_s, prompt, request.output_tokens, request.session)
        for request, prompt in zip(requests, maker.make(requests), strict=True)
    ]
    return Workload(
        spec.name, planned, window.duration_s, _origin(spec, trace, window, seed, cut_count)
    )


def _window(spec: WorkloadSpec, trace: Trace) -> Window:
    if spec.densest:
        assert spec.duration_s is not None
        return densest(trace.requests, spec.duration_s)
    return cut(trace.requests, spec.start_s, spec.duration_s)


def _scaled(spec: WorkloadSpec, window: Window, seed: int) -> Window:
    if spec.rate is not None:
        if not spec.rate > 0:
            raise WindowError(f"the rate {spec.rate:g} must be above 0")
        return scale(window, spec.rate / window.rate, spec.scaling, seed)
    if spec.factor is not None:
        return scale(window, spec.factor, spec.scaling, seed)
    return window


def _fitted(spec: WorkloadSpec, requests: Sequence[TraceRequest]) -> tuple[list[TraceRequest], int]:
    """The requests with token counts as wanted, and how many were cut to a limit."""
    fitted, cut_count = [], 0
    for request in requests:
        inputs, input_cut = _count(request.input_tokens, spec.token_factor, spec.max_input_tokens)
        outputs, output_cut = _count(
            request.output_tokens, spec.token_factor, spec.max_output_tokens
        )
        cut_count += input_cut or output_cut
        fitted.append(replace(request, input_tokens=inputs, output_tokens=outputs))
    return fitted, cut_count


def _count(tokens: int, factor: float, limit: int | None) -> tuple[int, bool]:
    wanted = max(1, round(tokens * factor))
    return (wanted, False) if limit is None or wanted <= limit else (limit, True)


def _origin(
    spec: WorkloadSpec, trace: Trace, window: Window, seed: int, cut_count: int
) -> dict[str, Any]:
    return {
        "trace": spec.trace.name,
        "format": trace.format,
        "skipped": trace.skipped,
        "out_of_order": trace.out_of_order,
        "window_start_s": window.start_s,
        "window_s": window.duration_s,
        "factor": window.factor,
        "scaling": window.scaling,
        "seed": seed,
        "token_factor": spec.token_factor,
        "cut_to_limit": cut_count,
        "sharing": spec.sharing,
    }


def steady_workload(
    name: str,
    tokens: Sequence[int],
    *,
    requests: int,
    rate: float,
    input_tokens: int,
    output_tokens: int,
    seed: int,
) -> Workload:
    """Equal requests at equal distances: for warm-up and for the low-load control."""
    asked = [TraceRequest(i / rate, input_tokens, output_tokens) for i in range(requests)]
    prompts = PromptMaker(tokens, seed).make(asked)
    planned = [
        PlannedRequest(r.at_s, prompt, output_tokens)
        for r, prompt in zip(asked, prompts, strict=True)
    ]
    return Workload(name, planned, requests / rate, {"steady_rate": rate, "seed": seed})
