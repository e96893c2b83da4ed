"""Runs the searches for each arm's capacity: one server an arm, flushed between rates.

Every search tries a rate before any tries its next: so where the plan starts servers together, a
sweep that is cut off is equally fine for all arms and workloads.

DIR/sweep/WORKLOAD/ARM/    records of every rate tried, `capacity.json`
DIR/servers/ARM-N/         log of a start of its server
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from sglang_morph.bench.arm_run import RUN_ERRORS, ArmServer, ArmSession, Progress
from sglang_morph.bench.comparison_run import Prepared, measured_slo
from sglang_morph.bench.plan import Sweep
from sglang_morph.bench.statistics import Slo
from sglang_morph.bench.sweep import (
    Capacity,
    Try,
    next_rate,
    read_capacities,
    search_folder,
    try_name,
    write_capacity,
)
from sglang_morph.bench.together_run import new_folder
from sglang_morph.bench.workload import Workload, make_workload
from sglang_morph.demo.provenance import Provenance


def sweep_arms(
    prepared: Prepared,
    sweeps: Sequence[Sweep],
    names: Sequence[str],
    output: Path,
    origin: Provenance,
    make_progress: Callable[[str], Progress],
    stop_after_s: float | None = None,
) -> None:
    """Do the searches of the arms of these names that aren't over yet; with `stop_after_s` begin no
    try later.

    An arm whose server fails is left out, and the error raised once the others are done. Raises
    `ServerFailed`, `NotSettled`.
    """
    plan = prepared.plan
    deadline = None if stop_after_s is None else time.monotonic() + stop_after_s
    sweeping = _Sweeping(prepared, output, origin, make_progress, deadline)
    over = {(found.workload, found.arm) for found in read_capacities(output) if found.over}
    pending = [
        (sweep, arm)
        for sweep in sweeps
        for arm in plan.arms_to_search(sweep)
        if arm in names and (sweep.workload, arm) not in over
    ]
    arms = list(dict.fromkeys(arm for _, arm in pending))
    for group in [arms] if plan.servers == "together" else [[arm] for arm in arms]:
        sweeping.search(group, [(sweep, arm) for sweep, arm in pending if arm in group])
    if sweeping.failed:
        raise sweeping.failed[0]


@dataclass(slots=True)
class _Search:
    """One arm's, of one workload."""

    session: ArmSession
    sweep: Sweep
    folder: Path
    progress: Progress
    tries: list[Try] = field(default_factory=list)

    @property
    def next_rate(self) -> float | None:
        sweep = self.sweep
        return next_rate(self.tries, sweep.low, sweep.high, sweep.steps, sweep.attainment)


@dataclass(slots=True)
class _Sweeping:
    prepared: Prepared
    output: Path
    origin: Provenance
    make_progress: Callable[[str], Progress]
    deadline: float | None
    failed: list[Exception] = field(default_factory=list)

    def search(self, arms: Sequence[str], pending: Sequence[tuple[Sweep, str]]) -> None:
        """Start the servers of `arms`, and let each search try a rate in turn until all are over.

        `pending`: what to search, and for which arm.
        """
        slo = measured_slo(self.prepared.plan, self.output, self.prepared.schedule)
        with ExitStack() as stack:
            began = time.monotonic()
            sessions = {arm: self._started(stack, arm) for arm in arms}
            ready = [
                arm
                for arm, session in sessions.items()
                if self._goes_on(session, partial(self._make_ready, session, began))
            ]
            searches = [
                self._search(sessions[arm], sweep) for sweep, arm in pending if arm in ready
            ]
            while searches:
                searches = [
                    s for s in searches if self._goes_on(s.session, partial(self._step, s, slo))
                ]

    def _goes_on(self, session: ArmSession, action: Callable[[], bool]) -> bool:
        """What `action` says, but False where the server fails, which is then ended: it would take
        time from those that are measured.
        """
        try:
            return action()
        except RUN_ERRORS as error:
            self.failed.append(error)
            session.process.stop()
            return False

    def _started(self, stack: ExitStack, arm: str) -> ArmSession:
        plan, prepared = self.prepared.plan, self.prepared
        folder = new_folder(self.output / "servers", arm)
        server = ArmServer(plan, plan.arm(arm), prepared.card, prepared.warmup, folder)
        return ArmSession.starting(stack, server, self.origin)

    def _make_ready(self, session: ArmSession, began: float) -> bool:
        deadline = began + self.prepared.plan.start_timeout_s
        session.wait_ready(deadline, self.make_progress(session.server.arm.name))
        session.begin()
        return True

    def _search(self, session: ArmSession, sweep: Sweep) -> _Search:
        arm = session.server.arm.name
        folder = search_folder(self.output, sweep.workload, arm)
        if folder.exists():
            shutil.rmtree(folder)  # Rates tried on two servers don't make one search.
        folder.mkdir(parents=True)
        return _Search(session, sweep, folder, self.make_progress(arm))

    def _step(self, search: _Search, slo: Slo) -> bool:
        """Try the next rate; False where there is none, or no time for it."""
        rate = search.next_rate
        if rate is None or (self.deadline is not None and time.monotonic() >= self.deadline):
            return False
        workload = self._workload(search.sweep, rate)
        record = search.session.measure(workload, slo, search.folder, search.progress)
        search.tries.append(Try(rate, record.row["slo_attainment"], record.row["goodput"]))
        over = search.next_rate is None
        capacity = Capacity(
            search.session.server.arm.name,
            search.sweep.workload,
            search.sweep.attainment,
            search.tries,
            over,
            asdict(self.origin),
        )
        write_capacity(search.folder, capacity)
        return not over

    def _workload(self, sweep: Sweep, rate: float) -> Workload:
        """The plan's workload at `rate`, of the sweep's window where it has one."""
        plan = self.prepared.plan
        spec = next(spec for spec in plan.workloads if spec.name == sweep.workload)
        at_rate = msgspec.structs.replace(
            spec,
            name=try_name(spec.name, rate),
            rate=rate,
            factor=None,
            duration_s=sweep.duration_s or spec.duration_s,
        )
        return make_workload(at_rate, self.prepared.tokens, plan.seed)
