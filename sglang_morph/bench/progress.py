"""Progress of a run, as lines that also read well in a log file."""

from __future__ import annotations

import time

import typer

from sglang_morph.bench.outcome import Outcome

_INTERVAL_S = 15.0


class RunLine:
    """Says what goes on, at most every `_INTERVAL_S` within one step."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._said_at = 0.0
        self._workload = ""
        self._requests = self._answered = self._failed = 0

    def starting(self, passed_s: float) -> None:
        self._say_sometimes(f"starting the server, {passed_s:.0f} s")

    def replaying(self, workload: str, requests: int) -> None:
        self._workload, self._requests = workload, requests
        self._answered = self._failed = 0
        self._said_at = 0.0
        self._say_sometimes(f"{workload}: {requests} requests")

    def finished(self, outcome: Outcome) -> None:
        self._answered += 1
        self._failed += not outcome.ok
        if self._answered == self._requests:
            self._said_at = 0.0
        self._say_sometimes(
            f"{self._workload}: {self._answered} of {self._requests}, {self._failed} failed"
        )

    def _say_sometimes(self, text: str) -> None:
        now = time.monotonic()
        if now - self._said_at >= _INTERVAL_S:
            self._said_at = now
            typer.echo(f"{self._run}: {text}")
