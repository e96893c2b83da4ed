"""Cuts a window out of a trace and changes its rate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sglang_morph.bench.traces import TraceRequest

Scaling = Literal["stretch", "thin"]


class WindowError(ValueError):
    """A window or rate that the trace can't give. The message has the remedy."""


@dataclass(frozen=True, slots=True)
class Window:
    """Requests that arrive within `[0, duration_s)`, and where they come from."""

    requests: list[TraceRequest]
    """`at_s` counts from the window's start."""
    duration_s: float
    start_s: float
    """Of the window, in seconds since the trace's first request."""
    factor: float = 1.0
    """Rate now over the rate in the trace."""
    scaling: Scaling = "stretch"

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.requests) / self.duration_s


def cut(requests: Sequence[TraceRequest], start_s: float, duration_s: float | None) -> Window:
    """The window of `duration_s` (None: all that is left) from `start_s` on.

    Raises `WindowError` if no request lies in it.
    """
    if duration_s is None:
        # Half a mean gap after the last request, so that the rate is that of the trace.
        left = [request for request in requests if request.at_s >= start_s]
        span = left[-1].at_s - start_s if left else 0.0
        duration_s = max(span * (1 + 0.5 / max(1, len(left))), 1.0)
    stop_s = start_s + duration_s
    inside = [
        replace(request, at_s=request.at_s - start_s)
        for request in requests
        if start_s <= request.at_s < stop_s
    ]
    if not inside:
        last = requests[-1].at_s
        raise WindowError(
            f"no request arrives between {start_s:g} and {stop_s:g} s; the trace ends at {last:g} s"
        )
    return Window(inside, duration_s, start_s)


def densest(requests: Sequence[TraceRequest], duration_s: float) -> Window:
    """The window of `duration_s` with most requests; the earliest of several."""
    best, best_count, stop = 0, 0, 0
    for first, request in enumerate(requests):
        while stop < len(requests) and requests[stop].at_s < request.at_s + duration_s:
            stop += 1
        if stop - first > best_count:
            best, best_count = first, stop - first
    return cut(requests, requests[best].at_s, duration_s)


def scale(window: Window, factor: float, scaling: Scaling, seed: int) -> Window:
    """Multiply the rate by `factor`.

    `stretch` moves the arrivals apart or together and keeps every request; `thin` keeps the
    duration and a seeded choice of the requests, so it can only lower the rate.
    Raises `WindowError`.
    """
    if not factor > 0:
        raise WindowError(f"the rate factor {factor:g} must be above 0")
    if scaling == "stretch":
        requests = [replace(request, at_s=request.at_s / factor) for request in window.requests]
        return replace(
            window,
            requests=requests,
            duration_s=window.duration_s / factor,
            factor=factor,
            scaling=scaling,
        )
    if factor > 1:
        raise WindowError(
            f"thinning can't raise the rate {factor:g} times; take a denser window, or stretch"
        )
    count = round(factor * len(window.requests))
    if count == 0:
        raise WindowError(f"thinning to {factor:g} leaves no request; take a longer window")
    chosen = sorted(random.Random(seed).sample(range(len(window.requests)), count))
    requests = [window.requests[i] for i in chosen]
    return replace(window, requests=requests, factor=factor, scaling=scaling)
