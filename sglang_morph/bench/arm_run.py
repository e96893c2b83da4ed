"""One run: a fresh server of an arm, warmed up, and every workload against it in a row."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import orjson

from sglang_morph.bench.card import Card
from sglang_morph.bench.measured_server import MeasuredServer
from sglang_morph.bench.outcome import Outcome
from sglang_morph.bench.plan import Arm, Plan
from sglang_morph.bench.record import write_record
from sglang_morph.bench.routes import make_route
from sglang_morph.bench.server_control import (
    NotSettled,
    memory_of,
    morph_status,
    server_info,
    set_level,
    wait_for_level,
    weights_digest,
)
from sglang_morph.bench.statistics import Slo
from sglang_morph.bench.workload import Workload
from sglang_morph.demo.provenance import Provenance
from sglang_morph.demo.server import ServerFailed, ServerProcess

CONTROL = "low-load-control"
EVENTS = "events.jsonl"
RUN = "run.json"

_RUN_ERRORS = (ServerFailed, NotSettled, httpx.HTTPError)


class Progress(Protocol):
    """Is told how a run gets on."""

    def starting(self, passed_s: float) -> None: ...
    def replaying(self, workload: str, requests: int) -> None: ...
    def finished(self, outcome: Outcome) -> None: ...


@dataclass(frozen=True, slots=True)
class ArmServer:
    """How an arm's server is started and treated, wherever it is measured."""

    plan: Plan
    arm: Arm
    card: Card | None
    warmup: Workload
    folder: Path
    """Of the server's log and event log."""

    @property
    def event_log(self) -> Path | None:
        return (self.folder / EVENTS).absolute() if self.arm.morphs else None

    def pin(self, measured: MeasuredServer) -> None:
        """Bring the server to the level of its own that the arm may have."""
        if self.arm.level:
            set_level(measured.url, self.arm.level)
            measured.settle()

    def command(self) -> list[str]:
        """The arm's command, and what the benchmark needs: metrics, event log, smaller card."""
        command = self.arm.words()
        command += self.card.flags(command) if self.card is not None else []
        if "--enable-metrics" not in command:
            command.append("--enable-metrics")
        if self.event_log is not None:
            command += ["--morph-event-log", str(self.event_log)]
        return command

    @contextmanager
    def running(self, progress: Progress) -> Iterator[tuple[ServerProcess, MeasuredServer]]:
        """A server that answers requests. Raises `ServerFailed` if it never does."""
        with ServerProcess(self.command(), self.arm.env, self.folder / "server.log") as process:
            process.wait_ready(self.plan.start_timeout_s, progress.starting)
            yield (
                process,
                MeasuredServer(
                    process.url,
                    make_route(self.plan.route, self.plan.served_model),
                    self.plan.model,
                    self.event_log,
                    self.plan.settle_timeout_s,
                    self.plan.drain_timeout_s,
                    self.arm.level,
                ),
            )


@dataclass(slots=True)
class RunReport:
    """`run.json`."""

    arm: str
    command: list[str]
    env: dict[str, str]
    card: dict[str, Any] | None
    origin: dict[str, str]
    error: str | None = None
    """Why the run ended early; the workloads after that are missing."""
    start_s: float = 0.0
    wall_s: float = 0.0
    memory: dict[str, Any] = field(default_factory=dict)
    weights_identical: bool | None = None
    """Whether the weights' digest was the same before and after; None where not compared."""


def run_arm(
    server: ArmServer,
    slo: Slo,
    workloads: Sequence[Workload],
    origin: Provenance,
    progress: Progress,
) -> RunReport:
    """Do the run and write it into the arm's folder.

    A server that dies or doesn't come to rest ends the run; what was done stays, and the report's
    `error` says why. Raises `ServerFailed` only for a server that never became ready.
    """
    started = time.monotonic()
    report = RunReport(
        arm=server.arm.name,
        command=server.command(),
        env=server.arm.env,
        card=None if server.card is None else server.card.as_dict(),
        origin=asdict(origin),
    )
    with server.running(progress) as (process, measured):
        report.start_s = time.monotonic() - started
        try:
            _measure_all(server, process, measured, slo, workloads, report, progress)
        except _RUN_ERRORS as error:
            report.error = f"{type(error).__name__}: {error}"
    report.wall_s = time.monotonic() - started
    (server.folder / RUN).write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    return report


def _measure_all(
    server: ArmServer,
    process: ServerProcess,
    measured: MeasuredServer,
    slo: Slo,
    workloads: Sequence[Workload],
    report: RunReport,
    progress: Progress,
) -> None:
    verify = server.event_log is not None and server.plan.verify_weights
    report.memory = _memory(measured)
    before = weights_digest(measured.url) if verify else None
    server.pin(measured)
    if morph := report.memory.get("morph"):
        morph["resting_tokens"] = morph_status(measured.url)["capacity_tokens"]
    measured.send(server.warmup)
    for workload in workloads:
        measured.settle()
        progress.replaying(workload.name, len(workload.requests))
        record = measured.measure(workload, slo, server.arm.name, progress.finished)
        write_record(server.folder, workload.name, record)
        process.check_alive()
    measured.settle()
    if before is not None:
        if server.arm.level:
            set_level(measured.url, 0)
            wait_for_level(measured.url, 0, server.plan.settle_timeout_s)
        report.weights_identical = before == weights_digest(measured.url)


def _memory(measured: MeasuredServer) -> dict[str, Any]:
    """What the server says of its memory, and of the bytes it can move."""
    memory: dict[str, Any] = {"sglang": memory_of(server_info(measured.url))}
    if measured.event_log is not None:
        status = morph_status(measured.url)
        memory["morph"] = {
            "bytes": status["bytes"],
            "base_tokens": status["base_tokens"],
            "levels": len(status["levels"]),
            "plan_digest": status["plan_digest"],
        }
    return memory
