"""A server of an arm: started, warmed up, measured, checked. One run is all workloads in a row."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import orjson

from sglang_morph.bench.card import Card
from sglang_morph.bench.measured_server import MeasuredServer
from sglang_morph.bench.outcome import Outcome
from sglang_morph.bench.plan import Arm, Plan
from sglang_morph.bench.record import Record, write_record
from sglang_morph.bench.routes import make_route
from sglang_morph.bench.server_control import (
    NotSettled,
    freeze_gc,
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

if TYPE_CHECKING:
    from typing_extensions import Self

CONTROL = "low-load-control"
EVENTS = "events.jsonl"
RUN = "run.json"

RUN_ERRORS = (ServerFailed, NotSettled, httpx.HTTPError)
"""What ends a server's use, but not a comparison."""


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

    def process(self) -> ServerProcess:
        """The server, not started yet."""
        return ServerProcess(self.command(), self.arm.env, self.folder / "server.log")

    def measured(self, process: ServerProcess) -> MeasuredServer:
        return MeasuredServer(
            process.url,
            make_route(self.plan.route, self.plan.served_model),
            self.plan.model,
            self.event_log,
            self.plan.settle_timeout_s,
            self.plan.drain_timeout_s,
            self.arm.level,
            self.arm.weights_gib,
            alone=self.plan.servers == "fresh",
        )

    @contextmanager
    def running(self, progress: Progress) -> Iterator[tuple[ServerProcess, MeasuredServer]]:
        """A server that answers requests. Raises `ServerFailed` if it never does."""
        with self.process() as process:
            process.wait_ready(self.plan.start_timeout_s, progress.starting)
            yield process, self.measured(process)


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

    def save(self, folder: Path) -> None:
        (folder / RUN).write_bytes(orjson.dumps(self, option=orjson.OPT_INDENT_2))


def new_report(server: ArmServer, origin: Provenance) -> RunReport:
    return RunReport(
        arm=server.arm.name,
        command=server.command(),
        env=server.arm.env,
        card=None if server.card is None else server.card.as_dict(),
        origin=asdict(origin),
    )


@dataclass(slots=True)
class ArmSession:
    """A server that answers requests, from its warm-up to the check of its weights.

    All of it may raise one of `RUN_ERRORS`; then the server is of no more use.
    """

    server: ArmServer
    process: ServerProcess
    measured: MeasuredServer
    report: RunReport
    digest: str | None = None
    """Of the weights before anything was sent; None where they are not compared."""

    @classmethod
    def starting(cls, stack: ExitStack, server: ArmServer, origin: Provenance) -> Self:
        """Of a server that is started now and ended with `stack`; `wait_ready` comes next."""
        process = stack.enter_context(server.process())
        return cls(server, process, server.measured(process), new_report(server, origin))

    def wait_ready(self, deadline: float, progress: Progress) -> None:
        """`deadline`: by the monotonic clock; one that has passed leaves a second."""
        self.process.wait_ready(max(1.0, deadline - time.monotonic()), progress.starting)

    def begin(self) -> None:
        """Note its memory, bring it to its level, warm it up, and settle its garbage collector."""
        url = self.measured.url
        self.report.memory = _memory(self.measured)
        if self.server.event_log is not None and self.server.plan.verify_weights:
            self.digest = weights_digest(url)
        self.server.pin(self.measured)
        if morph := self.report.memory.get("morph"):
            morph["resting_tokens"] = morph_status(url)["capacity_tokens"]
        self.measured.send(self.server.warmup)
        freeze_gc(url)

    def measure(self, workload: Workload, slo: Slo, folder: Path, progress: Progress) -> Record:
        """Replay from rest; the record is also written into `folder`."""
        self.measured.settle()
        progress.replaying(workload.name, len(workload.requests))
        record = self.measured.measure(workload, slo, self.server.arm.name, progress.finished)
        write_record(folder, workload.name, record)
        self.process.check_alive()
        return record

    def end(self) -> None:
        """Bring it to rest, and compare its weights with what they were."""
        url, arm = self.measured.url, self.server.arm
        self.measured.settle()
        if self.digest is None:
            return
        if arm.level:
            set_level(url, 0)
            wait_for_level(url, 0, self.server.plan.settle_timeout_s)
        self.report.weights_identical = self.digest == weights_digest(url)


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
    report = new_report(server, origin)
    with server.running(progress) as (process, measured):
        report.start_s = time.monotonic() - started
        session = ArmSession(server, process, measured, report)
        try:
            session.begin()
            for workload in workloads:
                session.measure(workload, slo, server.folder, progress)
            session.end()
        except RUN_ERRORS as error:
            report.error = describe(error)
    report.wall_s = time.monotonic() - started
    report.save(server.folder)
    return report


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _memory(measured: MeasuredServer) -> dict[str, Any]:
    """What the server says of its memory, and of the bytes it can move."""
    memory: dict[str, Any] = {"sglang": measured.memory(server_info(measured.url))}
    if measured.event_log is not None:
        status = morph_status(measured.url)
        memory["morph"] = {
            "bytes": status["bytes"],
            "base_tokens": status["base_tokens"],
            "levels": len(status["levels"]),
            "plan_digest": status["plan_digest"],
        }
    return memory
