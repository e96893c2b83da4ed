"""The controller: once per scheduler step, from signals over the policy to the executor."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from sglang_morph.controller.commands import Command, commit_if_ready
from sglang_morph.controller.eviction_cost import EvictionCost
from sglang_morph.controller.executor import Executor
from sglang_morph.controller.floors import Floors
from sglang_morph.controller.limits import LimitGuard, Limits
from sglang_morph.controller.manual import ManualPolicy
from sglang_morph.controller.monitor import Monitor
from sglang_morph.controller.needs import Needs
from sglang_morph.controller.outcome import Outcome
from sglang_morph.controller.policy import Decision, Policy
from sglang_morph.controller.request_counts import RequestCounts
from sglang_morph.controller.scheduler_view import read_signals
from sglang_morph.observability.event_log import EventLog
from sglang_morph.observability.records import TransitionRecord

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from memory_backends.base import MemoryBackend
    from sglang_morph.controller.changes import Result
    from sglang_morph.controller.signals import Signals
    from sglang_morph.observability.metrics import MorphMetrics

logger = logging.getLogger(__name__)

RETRY_S = 0.25
"""How long a transition that was deferred or failed is left alone before it is tried again."""


class Controller:
    """Lives in the scheduler process and is called from its thread only."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        policy: Policy,
        backend: MemoryBackend,
        event_log: EventLog,
        metrics: MorphMetrics | None,
        monitor: Monitor,
        eviction: EvictionCost,
    ) -> None:
        self.executor = executor
        self.policy = policy
        self.monitor = monitor
        self.counts = RequestCounts(monitor, eviction.reuse)
        self.limits = LimitGuard(len(executor.level_pages) - 1)
        self.floors = Floors(self.limits.top_level)
        self.needs = Needs(executor.level_pages)
        self.obstacle: str | None = None
        """Why the transition wanted last has not happened."""
        self.revision = 0
        """Counts transitions that changed something, and an operator's changes."""
        self._scheduler = scheduler
        self._backend = backend
        self._log = event_log
        self._metrics = metrics
        self._eviction = eviction
        self._level_pages = executor.level_pages
        self._retry_at = 0.0
        self._restore: tuple[Command, Signals] | None = None
        """What began the restore under way."""

    def tick(self) -> None:
        """A step boundary: the forward before may still run, the next batch is not planned yet."""
        signals = self._read()
        self.monitor.observe(signals)
        self._log.signals(signals, self.executor.report)
        if self._metrics:
            self._metrics.update(signals, self._backend.layers_lowered, self._backend.host_bytes)
        decision = self.policy.observe(signals) or self._spare_prefixes(signals)
        if signals.now < self._retry_at:
            return
        if self.executor.restoring:
            self._continue_restore(signals)
            return
        decision, self.obstacle = self._within_bounds(decision, signals)
        if decision is not None:
            self._carry_out(decision, signals)

    def relieve(self, batch: ScheduleBatch) -> bool:
        """The next decode step lacks pages: go up just far enough, whatever the dwell.

        Called after SGLang evicted what it could, instead of retracting a request.
        """
        if not self.policy.relieves:
            return False
        allocator = self._scheduler.token_to_kv_pool_allocator
        missing = batch.new_tokens_required_next_decode() - allocator.available_size()
        target = self._level_that_adds(missing)
        if target is None:
            return False
        signals = self._read()
        if obstacle := self.limits.obstacle(signals.level, target, signals.now):
            self.obstacle = obstacle
            return False
        decision = Decision(target, f"the next decode step lacks {missing} pages")
        if self._carry_out(decision, signals).result != "completed":
            return False
        # The scheduler is in the middle of a step: its own running batch may be another object.
        batch.batch_is_full = False
        self.monitor.emergency()
        self._log.emergency(self.revision, decision, signals)
        if self._metrics:
            self._metrics.retraction_avoided()
        return True

    @property
    def reach(self) -> int:
        """The deepest level that a request which has just arrived may count on."""
        if isinstance(self.policy, ManualPolicy):
            return self.executor.target_level
        return self._allowed_level

    def may_lower_now(self, level: int) -> bool:
        """Whether precision may fall to `level` for a request that needs its pages."""
        now = self.executor.level
        return (
            self.policy.relieves
            and level <= self._allowed_level
            and self.limits.obstacle(now, level, time.perf_counter()) is None
        )

    def replace_policy(self, policy: Policy) -> None:
        """`policy` decides from the next reading on, and begins with its dwell."""
        self.policy = policy
        policy.moved(time.perf_counter(), self.executor.level)

    def set_limits(self, limits: Limits) -> None:
        """`limits` are in force from now on; they have been checked."""
        self.limits.limits = limits
        rate = limits.restore_gb_per_s
        self._backend.limit_uploads(None if rate is None else rate * 1e9)

    def act_on_change(self) -> None:
        """An operator has changed something: do now what follows from it."""
        self.revision += 1
        self._retry_at = 0.0
        self.tick()

    def log_change(
        self, name: str, change: dict[str, Any], result: Result, reason: str | None
    ) -> None:
        """Note what became of an operator's change."""
        self._log.operator(self.revision, name, change, result, reason)
        logger.info("Operator: %s %s, %s%s", name, change, result, f" ({reason})" if reason else "")

    def events(self, limit: int, after: int | None) -> dict[str, Any]:
        """Plain values for `/morph/events`."""
        return {"revision": self.revision, **self._log.page(limit, after)}

    def status(self) -> dict[str, Any]:
        """Plain values for `/morph/status`."""
        return {
            "level": self.executor.level,
            "target_level": self.executor.target_level,
            "restoring": self.executor.restoring,
            "obstacle": self.obstacle,
            "revision": self.revision,
            "policy": self.policy.describe(),
            "limits": self.limits.describe(),
            "eviction": self._eviction.describe(),
            "monitor": self.monitor.summary(),
            "event_log": {"path": self._log.path, "dropped": self._log.dropped},
            "events": list(self._log.recent)[-32:],
        }

    def _read(self) -> Signals:
        return read_signals(
            self._scheduler, self.executor.level, self._level_pages, self.counts, self.monitor
        )

    @property
    def _allowed_level(self) -> int:
        """The highest that policy and limits allow."""
        return min(self.policy.max_level, self.limits.highest)

    @property
    def _highest_level(self) -> int:
        """That policy, limits and running requests allow."""
        return min(self._allowed_level, self.floors.running)

    def _within_bounds(
        self, decision: Decision | None, signals: Signals
    ) -> tuple[Decision | None, str | None]:
        """`decision` within what requests demand and the operator allows, and what hinders it.

        The operator may keep a waiting request waiting, but not break a promise to a running one.
        Where a waiting one wants precision and another pages, who runs decides.
        """
        level = signals.level
        decision, demanded = self.floors.bound(decision, level)
        highest = self._highest_level if self.policy.relieves else level
        decision, needed = self.needs.bound(decision, level, highest)
        decision, limited = self.limits.bound(decision, level, signals.now)
        if not self.floors.permit(decision, level):
            return None, "a running request does not allow what the limits ask for"
        if not self.needs.permit(decision, level):
            return None, "a running request is too long for the level that is asked for"
        return decision, limited or needed or demanded

    def _spare_prefixes(self, signals: Signals) -> Decision | None:
        """Lower precision where that costs less than the prefixes SGLang would evict next."""
        verdict = self._eviction.weigh(signals, self._highest_level)
        if verdict is None:
            return None
        reason = verdict.reason
        if verdict.morph:
            if self.policy.may_lower(signals.now):
                return Decision(verdict.level, reason)
            reason += "; the policy allows no move now"
        self._log.eviction(self.revision, verdict.pages, reason, signals)
        return None

    def _level_that_adds(self, pages: int) -> int | None:
        """The lowest higher level that lends `pages` more, if one is allowed."""
        for level in range(self.executor.target_level + 1, self._highest_level + 1):
            if self.executor.gain(level) >= pages:
                return level
        return None

    def _carry_out(self, decision: Decision, signals: Signals) -> Outcome:
        """Turn the decision into a command and have it executed."""
        lowers = decision.target > self.executor.target_level
        command = Command(
            "lower" if lowers else "withdraw", decision.target, self.revision + 1, decision.reason
        )
        outcome = self.executor.execute(command)
        assert outcome is not None  # only a commit may have none
        if outcome.pages_lent:
            # SGLang admits nobody while this is set, and clears it only when a request leaves.
            self._scheduler.running_batch.batch_is_full = False
        self.obstacle = outcome.error
        if outcome.result in ("deferred", "rolled_back"):
            self._retry_at = signals.now + RETRY_S
        else:
            self.revision = command.revision
            self._log.decision(self.revision, decision, signals)
        self._record(outcome, command.reason, signals)
        if outcome.result == "started":
            self._restore = (command, signals)
            self._continue_restore(signals)
        elif outcome.result == "completed":
            # One that was stopped short goes on, down to the level just lent for.
            self._restore = (command, signals) if self.executor.restoring else None
            self._moved(signals.now)
        return outcome

    def _continue_restore(self, signals: Signals) -> None:
        """Readiness is an input: only the command that follows from it brings weights back."""
        readiness = self.executor.readiness()
        if readiness is None or self._restore is None:
            return
        began, trigger = self._restore
        command = commit_if_ready((readiness,), began)
        outcome = None if command is None else self.executor.execute(command)
        if outcome is None:
            return
        self._record(outcome, began.reason, trigger)
        if outcome.result == "completed":
            self._restore = None
            self._moved(signals.now)
        else:
            self._retry_at = signals.now + RETRY_S

    def _moved(self, now: float) -> None:
        self.limits.moved(now)
        self.policy.moved(now, self.executor.level)

    def _record(self, outcome: Outcome, reason: str, signals: Signals) -> None:
        self.monitor.transition(outcome.result)
        record = TransitionRecord(self.revision, reason, signals, outcome)
        self._log.transition(record)
        if outcome.result in ("started", "completed"):
            # The next tick may be seconds away, behind a long prefill.
            self._log.signals(self._read(), self.executor.report, at_once=True)
        if self._metrics:
            self._metrics.transition(record)
        _tell(record)


def _tell(record: TransitionRecord) -> None:
    outcome = record.outcome
    move = (outcome.from_level, outcome.to_level)
    if outcome.result == "rolled_back":
        logger.error("Morph %d -> %d was rolled back: %s", *move, outcome.error)
    elif outcome.result != "deferred":
        logger.info(
            "Morph %d -> %d %s in %.1f ms (%s): %d pages lent, %d withdrawn, %d migrated, "
            "%d evicted",
            *move,
            outcome.result,
            outcome.duration_s * 1e3,
            record.reason,
            outcome.pages_lent,
            outcome.pages_withdrawn,
            outcome.pages_migrated,
            outcome.pages_evicted,
        )
