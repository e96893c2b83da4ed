"""Servers side by side on one machine, and what one batch of equal requests measures on them."""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_morph.bench.outcome import Outcome
from sglang_morph.bench.replay import replay, run_loop
from sglang_morph.bench.routes import make_route
from sglang_morph.bench.workload import Workload, steady_workload
from sglang_morph.demo.server import ServerProcess

START_TIMEOUT_S = 300.0
DRAIN_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Equal requests sent at once. Seconds."""

    outcomes: list[Outcome]
    duration_s: float

    @property
    def output_tokens_per_s(self) -> float:
        return sum(o.output_tokens for o in self.outcomes) / self.duration_s

    @property
    def median_gap_s(self) -> float:
        """P50 of the time between two tokens of a request, first tokens left out."""
        return statistics.median(gap for o in self.outcomes for gap in o.gaps_s)

    @property
    def failed(self) -> int:
        return sum(not o.ok for o in self.outcomes)


@contextmanager
def serving(commands: Mapping[str, str], logs: Path) -> Iterator[dict[str, str]]:
    """Start all `commands` (`python -m ...`) at once; name -> URL once all are ready."""
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                ServerProcess([sys.executable, *shlex.split(command)[1:]], {}, logs / f"{name}.log")
            )
            for name, command in commands.items()
        }
        began = time.monotonic()
        for name, server in servers.items():
            server.wait_ready(START_TIMEOUT_S, lambda passed: None)
            print(f"{name} is ready after {time.monotonic() - began:.0f} s", flush=True)
        yield {name: server.url for name, server in servers.items()}


def send(url: str, workload: Workload) -> Batch:
    """Send `workload` and wait for every answer."""
    done = run_loop(replay(url, make_route("sglang", "default"), workload, DRAIN_TIMEOUT_S))
    return Batch(done.outcomes, done.duration_s)


def equal_requests(number: int, inputs: int, outputs: int, seed: int) -> Workload:
    """`number` requests at once, token ids below 30,000 so that any vocabulary has them."""
    ids = [100 + (i * 7919) % 29_000 for i in range(20_000)]
    return steady_workload(
        f"{number} at once",
        ids,
        requests=number,
        rate=1e6,
        input_tokens=inputs,
        output_tokens=outputs,
        seed=seed,
    )


class Morphing:
    """A server's `/morph` routes."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120.0)

    def status(self) -> dict[str, Any]:
        return self._http.get("/morph/status").raise_for_status().json()

    def set_level(self, level: int) -> None:
        self._http.post("/morph/level", json={"level": level}).raise_for_status()

    def go_to(self, level: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """The status once the server rests at `level`."""
        self.set_level(level)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.status()
            if status["level"] == level and not status["restoring"]:
                return status
            time.sleep(0.01)
        raise TimeoutError(f"not at level {level}: {status['obstacle']}")

    def verify(self) -> dict[str, Any]:
        return self._http.post("/morph/verify").raise_for_status().json()
