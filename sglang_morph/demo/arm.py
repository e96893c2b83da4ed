"""One arm of the comparison: a server with one memory backend, and the burst against it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from sglang_morph.demo.burst import BurstRequest
from sglang_morph.demo.client import Finished, RequestResult, replay
from sglang_morph.demo.model_shape import read_shape
from sglang_morph.demo.samples import MetricsSampler, Sample, morph_samples, static_samples
from sglang_morph.demo.server import ServerProcess
from sglang_morph.observability.event_log import read_events

STATIC = "static"
START_TIMEOUT_S = 300.0
SETTLE_TIMEOUT_S = 60.0
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # SGLang's own accounting of KV pages after every step: a leak or a page with two owners ends
    # the server. Costs 0.5% of the scheduler's time here.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}

_REST_S = 2.0
"""Time recorded after the last answer, so that the timeline shows the server at rest."""


@dataclass(frozen=True, slots=True)
class ArmSetup:
    """What one server is started with. Equal but for `backend` in a fair comparison."""

    backend: str
    checkpoint: Path
    base_tokens: int
    """KV tokens at level 0 (`--max-total-tokens`)."""
    output: Path
    """Folder of the server's log and its event log."""

    @property
    def event_log(self) -> Path | None:
        return None if self.backend == STATIC else self.output / f"{self.backend}.events.jsonl"

    @property
    def server_log(self) -> Path:
        return self.output / f"{self.backend}.log"

    def shown_command(self) -> list[str]:
        """`command` as it reads on any machine."""
        own = {sys.executable: "python", str(self.checkpoint): self.checkpoint.name}
        return [own.get(word, word) for word in self.command()]

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "sglang_morph.launch_server"]
        command += ["--model-path", str(self.checkpoint), "--device", "cpu", "--dtype", "float32"]
        command += ["--memory-backend", self.backend]
        command += ["--max-total-tokens", str(self.base_tokens), "--context-length", "1024"]
        command += ["--enable-metrics", "--decode-log-interval", "5"]
        if self.event_log is not None:
            command += ["--morph-policy", "threshold", "--morph-event-log", str(self.event_log)]
        return command


@dataclass(frozen=True, slots=True)
class WeightsCheck:
    """Digests over all parameters before the burst and after it, and the level they ended at."""

    before: str
    after: str
    level: int

    @property
    def identical(self) -> bool:
        return self.before == self.after


@dataclass(frozen=True, slots=True)
class ArmRun:
    """All that was seen of one arm."""

    setup: ArmSetup
    started: float
    """UNIX seconds of the burst's start."""
    wall_s: float
    """From the burst's start to its last answer."""
    results: list[RequestResult]
    samples: list[Sample]
    retractions: int
    transitions: list[dict[str, Any]]
    """Event log rows of completed level changes, in order."""
    weights: WeightsCheck | None
    """None for `static`."""


class Reporter(Protocol):
    """Is told how an arm gets on."""

    def starting(self, passed_s: float) -> None: ...
    def finished(self, result: RequestResult) -> None: ...
    def settling(self, level: int) -> None: ...


def run_arm(setup: ArmSetup, burst: Sequence[BurstRequest], reporter: Reporter) -> ArmRun:
    """Start a server, replay `burst`, wait until it is back at level 0, stop it.

    Raises `ServerFailed`, `httpx.HTTPError`.
    """
    if setup.event_log is not None:
        setup.event_log.unlink(missing_ok=True)  # a server appends to it
    with ServerProcess(setup.command(), _ENV, setup.server_log) as server:
        server.wait_ready(START_TIMEOUT_S, reporter.starting)
        before = None if setup.event_log is None else _verify(server.url)
        sampler = MetricsSampler(server.url)
        started = time.time()
        results, wall_s = asyncio.run(_replay(server.url, burst, sampler, reporter.finished))
        server.check_alive()
        weights = None
        if before is not None:
            _settle(server.url, reporter.settling)
            time.sleep(_REST_S)
            after = _verify(server.url)
            weights = WeightsCheck(before["digest"], after["digest"], after["level"])
    samples, transitions = _history(setup, sampler)
    return ArmRun(
        setup=setup,
        started=started,
        wall_s=wall_s,
        results=results,
        samples=[sample for sample in samples if sample.time >= started],
        retractions=sampler.retractions,
        transitions=transitions,
        weights=weights,
    )


def _history(setup: ArmSetup, sampler: MetricsSampler) -> tuple[list[Sample], list[dict[str, Any]]]:
    """Samples and completed transitions of an arm that has ended."""
    if setup.event_log is None:
        return static_samples(sampler.readings, read_shape(setup.checkpoint)), []
    events = read_events(setup.event_log)
    transitions = [e for e in events if e["kind"] == "transition" and e["result"] == "completed"]
    return morph_samples(events), transitions


async def _replay(
    url: str, burst: Sequence[BurstRequest], sampler: MetricsSampler, finished: Finished
) -> tuple[list[RequestResult], float]:
    sampling = asyncio.create_task(sampler.run())
    start = time.monotonic()
    try:
        results = await replay(url, burst, start, finished)
        wall_s = time.monotonic() - start
        await asyncio.sleep(_REST_S)
    finally:
        sampling.cancel()
    return results, wall_s


def _settle(url: str, settling: Callable[[int], None]) -> None:
    """Wait until the server is back at level 0, or until it had time enough for it."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while (level := _get_level(url)) > 0 and time.monotonic() < deadline:
        settling(level)
        time.sleep(0.5)


def _get_level(url: str) -> int:
    response = httpx.get(f"{url}/morph/status", timeout=30.0)
    response.raise_for_status()
    return int(response.json()["level"])


def _verify(url: str) -> dict[str, Any]:
    response = httpx.post(f"{url}/morph/verify", timeout=60.0)
    response.raise_for_status()
    payload: dict[str, Any] = response.json()
    return payload
