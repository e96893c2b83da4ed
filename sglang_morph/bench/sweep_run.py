"""Runs the search for each arm's capacity: one server an arm, flushed between rates.

Where the plan starts servers together, all arms try a rate before any tries its next, so that a
search that is cut off is equally fine in all of them.

DIR/sweep/ARM/             log, records of every rate tried, `capacity.json`
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
from sglang_morph.bench.plan import PlanError, Sweep
from sglang_morph.bench.statistics import Slo
from sglang_morph.bench.sweep import Capacity, Try, next_rate, read_capacities, write_capacity
from sglang_morph.bench.workload import Workload, make_workload
from sglang_morph.demo.provenance import Provenance


def sweep_arms(
    prepared: Prepared,
    sweep: Sweep,
    output: Path,
    origin: Provenance,
    make_progress: Callable[[str], Progress],
    stop_after_s: float | None = None,
) -> None:
    """Search for every arm whose search isn't over yet; with `stop_after_s` begin no try later.

    An arm whose server fails is left out, and the error raised once the others are done. Raises
    `PlanError`, `ServerFailed`, `NotSettled`.
    """
    plan = prepared.plan
    deadline = None if stop_after_s is None else time.monotonic() + stop_after_s
    sweeping = _Sweeping(prepared, sweep, output, origin, make_progress, deadline)
    found = read_capacities(output)
    if other := {c.workload for c in found} - {sweep.workload}:
        raise PlanError(f"{output} holds a search with {other.pop()}; give another --output")
    over = {capacity.arm for capacity in found if capacity.over}
    wanted = sweep.arms or plan.arms_of(sweep.workload)
    arms = [arm for arm in wanted if arm not in over]
    for group in [arms] if plan.servers == "together" else [[arm] for arm in arms]:
        sweeping.search(group)
    if sweeping.failed:
        raise sweeping.failed[0]


@dataclass(slots=True)
class _Search:
    """One arm's."""

    session: ArmSession
    folder: Path
    progress: Progress
    tries: list[Try] = field(default_factory=list)


@dataclass(slots=True)
class _Sweeping:
    prepared: Prepared
    sweep: Sweep
    output: Path
    origin: Provenance
    make_progress: Callable[[str], Progress]
    deadline: float | None
    failed: list[Exception] = field(default_factory=list)

    def search(self, arms: Sequence[str]) -> None:
        """Start the servers of `arms`, and let them try a rate each until all are done."""
        slo = measured_slo(self.prepared.plan, self.output, self.prepared.schedule)
        with ExitStack() as stack:
            began = time.monotonic()
            searches = [self._started(stack, arm) for arm in arms]
            searches = [s for s in searches if self._goes_on(partial(self._make_ready, s, began))]
            while searches:
                searches = [s for s in searches if self._goes_on(partial(self._step, s, slo))]

    def _goes_on(self, action: Callable[[], bool]) -> bool:
        """What `action` says, but False where the server fails."""
        try:
            return action()
        except RUN_ERRORS as error:
            self.failed.append(error)
            return False

    def _started(self, stack: ExitStack, name: str) -> _Search:
        folder = self.output / "sweep" / name
        if folder.exists():
            shutil.rmtree(folder)  # Rates tried on two servers don't make one search.
        folder.mkdir(parents=True)
        plan, prepared = self.prepared.plan, self.prepared
        server = ArmServer(plan, plan.arm(name), prepared.card, prepared.warmup, folder)
        session = ArmSession.starting(stack, server, self.origin)
        return _Search(session, folder, self.make_progress(name))

    def _make_ready(self, search: _Search, began: float) -> bool:
        deadline = began + self.prepared.plan.start_timeout_s
        search.session.wait_ready(deadline, search.progress)
        search.session.begin()
        return True

    def _step(self, search: _Search, slo: Slo) -> bool:
        """Try the next rate; False where there is none, or no time for it."""
        rate = self._next_rate(search)
        if rate is None or (self.deadline is not None and time.monotonic() >= self.deadline):
            return False
        workload = self._workload(rate)
        record = search.session.measure(workload, slo, search.folder, search.progress)
        search.tries.append(Try(rate, record.row["slo_attainment"], record.row["goodput"]))
        over = self._next_rate(search) is None
        capacity = Capacity(
            search.session.server.arm.name,
            self.sweep.workload,
            self.sweep.attainment,
            search.tries,
            over,
            asdict(self.origin),
        )
        write_capacity(search.folder, capacity)
        return not over

    def _next_rate(self, search: _Search) -> float | None:
        sweep = self.sweep
        return next_rate(search.tries, sweep.low, sweep.high, sweep.steps, sweep.attainment)

    def _workload(self, rate: float) -> Workload:
        """The plan's workload at `rate`, of the sweep's window where it has one."""
        plan = self.prepared.plan
        spec = next(spec for spec in plan.workloads if spec.name == self.sweep.workload)
        at_rate = msgspec.structs.replace(
            spec,
            name=f"{spec.name}@{rate:.3f}",
            rate=rate,
            factor=None,
            duration_s=self.sweep.duration_s or spec.duration_s,
        )
        return make_workload(at_rate, self.prepared.tokens, plan.seed)
