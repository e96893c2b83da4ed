"""Carries a plan out with the servers of all arms at once: they take turns with every workload.

Starting a server can take longer than a workload. All arms get one workload, then all get the next,
so a comparison that is cut off has whole comparisons; and it goes on with the turns that are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from sglang_morph.bench.arm_run import (
    CONTROL,
    RUN_ERRORS,
    ArmServer,
    ArmSession,
    Progress,
    describe,
)
from sglang_morph.bench.comparison_run import DONE, Prepared, measured_slo, pending_runs
from sglang_morph.bench.plan import Plan
from sglang_morph.bench.record import has_record
from sglang_morph.bench.schedule import ScheduledRun
from sglang_morph.bench.workload import Workload
from sglang_morph.demo.provenance import Provenance

_PAUSE_S = 10.0
"""First guess of what a turn takes besides its arrivals: the drain, and coming to rest."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A workload of a run."""

    run: ScheduledRun
    workload: Workload


def turns(plan: Plan, runs: Sequence[ScheduledRun], workloads: Sequence[Workload]) -> list[Turn]:
    """Block by block and workload by workload its arms, every second workload backwards.

    The control doesn't count: so with three workloads the last begins with the plan's first arms.
    Where a workload names its arms, their order is the one it gives, and backwards in every second
    block.
    """
    blocks = dict.fromkeys(run.block for run in runs)
    ordered = []
    for block in blocks:
        arms, number = {run.arm: run for run in runs if run.block == block}, 0
        for workload in workloads:
            named = plan.has_own_order(workload.name)
            names = [a for a in (plan.arms_of(workload.name) if named else arms) if a in arms]
            backwards = (block if named else number) % 2
            ordered += [Turn(arms[a], workload) for a in (names[::-1] if backwards else names)]
            number += workload.name != CONTROL
    return ordered


def carry_out_together(
    prepared: Prepared,
    runs: Sequence[ScheduledRun],
    output: Path,
    origin: Provenance,
    make_progress: Callable[[ScheduledRun], Progress],
    stop_after_s: float | None = None,
) -> list[ScheduledRun]:
    """Do `runs`, and return those that are not finished.

    An arm whose server doesn't start, dies or doesn't come to rest is left out from then on, and
    its `run.json` says why. With `stop_after_s` no turn but the first is begun that should end
    later than that.
    """
    comparison = _Together(prepared, runs, output, origin, make_progress)
    if runs:
        comparison.carry_out(stop_after_s)
    return pending_runs(output, runs)


class _Together:
    def __init__(
        self,
        prepared: Prepared,
        runs: Sequence[ScheduledRun],
        output: Path,
        origin: Provenance,
        make_progress: Callable[[ScheduledRun], Progress],
    ) -> None:
        self._prepared = prepared
        self._runs = runs
        self._output = output
        self._origin = origin
        self._make_progress = make_progress
        self._sessions: dict[str, ArmSession] = {}
        """By arm, of the servers that are of use."""

    def folder(self, run: ScheduledRun) -> Path:
        return self._output / "runs" / run.folder

    def carry_out(self, stop_after_s: float | None) -> None:
        begin = time.monotonic()
        for run in self._runs:
            self.folder(run).mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self._start(stack)
            missing = [
                turn
                for turn in turns(self._prepared.plan, self._runs, self._prepared.workloads)
                if not has_record(self.folder(turn.run), turn.workload.name)
            ]
            complete = self._take(missing, begin, stop_after_s)
            for arm in list(self._sessions):
                self._attempt(arm, self._sessions[arm].end)
                if complete and arm in self._sessions:
                    self._mark_done(arm)

    def _start(self, stack: ExitStack) -> None:
        """Start all servers, wait for each, and warm each up."""
        prepared, plan = self._prepared, self._prepared.plan
        began = time.monotonic()
        first_runs = {run.arm: run for run in reversed(self._runs)}
        for arm in (arm for arm in plan.arms if arm.name in first_runs):
            folder = new_folder(self._output / "servers", arm.name)
            server = ArmServer(plan, arm, prepared.card, prepared.warmup, folder)
            self._sessions[arm.name] = ArmSession.starting(stack, server, self._origin)
        for arm_name, session in list(self._sessions.items()):
            progress = self._make_progress(first_runs[arm_name])
            deadline = began + plan.start_timeout_s
            self._attempt(arm_name, partial(session.wait_ready, deadline, progress))
            session.report.start_s = time.monotonic() - began
        for arm_name in list(self._sessions):
            self._attempt(arm_name, self._sessions[arm_name].begin)

    def _take(self, missing: Iterable[Turn], begin: float, stop_after_s: float | None) -> bool:
        """Take the turns; False if time ran out before all were taken."""
        pause_s = 0.0
        for position, turn in enumerate(missing):
            if turn.run.arm not in self._sessions:
                continue
            passed, expected = time.monotonic() - begin, turn.workload.duration_s + pause_s
            if stop_after_s is not None and position and passed + expected > stop_after_s:
                return False
            turn_begin = time.monotonic()
            self._measure(turn)
            took = time.monotonic() - turn_begin
            pause_s = max(pause_s, _PAUSE_S, took - turn.workload.duration_s)
        return True

    def _measure(self, turn: Turn) -> None:
        session, prepared = self._sessions[turn.run.arm], self._prepared
        slo = measured_slo(prepared.plan, self._output, prepared.schedule)
        progress = self._make_progress(turn.run)
        folder = self.folder(turn.run)
        self._attempt(turn.run.arm, partial(session.measure, turn.workload, slo, folder, progress))

    def _attempt(self, arm: str, action: Callable[[], object]) -> None:
        """Do it and save the reports of the arm's runs; where it fails, leave the arm out.

        Its server is ended then: it would take time from those that are measured.
        """
        session = self._sessions[arm]
        try:
            action()
        except RUN_ERRORS as error:
            session.report.error = describe(error)
            session.process.stop()
            del self._sessions[arm]
        for run in self._runs:
            if run.arm == arm:
                session.report.save(self.folder(run))

    def _mark_done(self, arm: str) -> None:
        for run in self._runs:
            if run.arm == arm:
                (self.folder(run) / DONE).write_text("")


def new_folder(parent: Path, name: str) -> Path:
    """A server that is started again must not write over the log of the one before."""
    folder = next(f for n in count() if not (f := parent / f"{name}-{n}").exists())
    folder.mkdir(parents=True)
    return folder
