"""The controller: once per scheduler step, from signals over the policy to the executor."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_morph.controller.executor import Executor, Outcome
from sglang_morph.controller.manual import ManualPolicy
from sglang_morph.controller.monitor import Monitor
from sglang_morph.controller.policy import Decision, Policy
from sglang_morph.controller.request_counts import RequestCounts
from sglang_morph.controller.scheduler_view import growth_reserve, page_tables, read_signals
from sglang_morph.observability.event_log import EventLog
from sglang_morph.observability.records import TransitionRecord

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from memory_backends.base import MemoryBackend
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
    ) -> None:
        self.executor = executor
        self.policy = policy
        self.monitor = monitor
        self.counts = RequestCounts(monitor)
        self.revision = 0
        """Counts transitions that changed something; names the state of weights and pages."""
        self._scheduler = scheduler
        self._backend = backend
        self._log = event_log
        self._metrics = metrics
        self._level_pages = executor.level_pages
        self._retry_at = 0.0
        self._restore: tuple[Decision, Signals] | None = None
        """What began the restore under way."""
        self._obstacle: str | None = None
        """Why the transition wanted last has not happened."""

    def tick(self) -> None:
        """A step boundary: the forward before may still run, the next batch is not planned yet."""
        signals = self._read()
        self.monitor.observe(signals)
        self._log.signals(signals, self._backend.report)
        if self._metrics:
            self._metrics.update(signals, self._backend.layers_lowered, self._backend.host_bytes)
        decision = self.policy.observe(signals)
        if signals.now < self._retry_at:
            return
        if self.executor.restoring:
            self._continue_restore(signals)
        elif decision is not None:
            self._carry_out(decision, signals)
        else:
            self._obstacle = None

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

    def set_level(self, level: int) -> None:
        """An operator's wish. Raises ValueError where the policy decides, or out of range."""
        if not isinstance(self.policy, ManualPolicy):
            raise ValueError(
                f"policy {self.policy.name!r} decides the level; "
                "start the server with --morph-policy manual"
            )
        self.policy.set_level(level)
        self._retry_at = 0.0

    def status(self) -> dict[str, Any]:
        """Plain values for `/morph/status`."""
        return {
            "level": self.executor.level,
            "target_level": self.executor.target_level,
            "restoring": self.executor.restoring,
            "obstacle": self._obstacle,
            "revision": self.revision,
            "policy": self.policy.describe(),
            "monitor": self.monitor.summary(),
            "event_log": {"path": self._log.path, "dropped": self._log.dropped},
            "events": list(self._log.recent)[-32:],
        }

    def _read(self) -> Signals:
        return read_signals(
            self._scheduler, self.executor.level, self._level_pages, self.counts, self.monitor
        )

    def _level_that_adds(self, pages: int) -> int | None:
        """The lowest higher level that lends `pages` more, if the policy allows one."""
        for level in range(self.executor.target_level + 1, self.policy.max_level + 1):
            if self.executor.gain(level) >= pages:
                return level
        return None

    def _carry_out(self, decision: Decision, signals: Signals) -> Outcome:
        outcome = self.executor.move(
            decision.target,
            lambda: page_tables(self._scheduler),
            lambda: growth_reserve(self._scheduler),
        )
        if outcome.lent:
            # SGLang admits nobody while this is set, and clears it only when a request leaves.
            self._scheduler.running_batch.batch_is_full = False
        self._obstacle = outcome.error
        if outcome.result in ("deferred", "rolled_back"):
            self._retry_at = signals.now + RETRY_S
        else:
            self.revision += 1
            self._log.decision(self.revision, decision, signals)
        self._record(outcome, decision, signals)
        if outcome.result == "started":
            self._restore = (decision, signals)
            self._continue_restore(signals)
        elif outcome.result == "completed":
            # One that was stopped short goes on, down to the level just lent for.
            self._restore = (decision, signals) if self.executor.restoring else None
            self.policy.moved(signals.now, self.executor.level)
        return outcome

    def _continue_restore(self, signals: Signals) -> None:
        outcome = self.executor.advance()
        if outcome is None or self._restore is None:
            return
        self._record(outcome, *self._restore)
        if outcome.result == "completed":
            self._restore = None
            self.policy.moved(signals.now, self.executor.level)
        else:
            self._retry_at = signals.now + RETRY_S

    def _record(self, outcome: Outcome, decision: Decision, signals: Signals) -> None:
        self.monitor.transition(outcome.result)
        record = TransitionRecord(
            revision=self.revision,
            from_level=outcome.source,
            to_level=outcome.target,
            reason=decision.reason,
            result=outcome.result,
            signals=signals,
            pages_lent=outcome.lent,
            pages_withdrawn=outcome.withdrawn,
            pages_migrated=outcome.migrated,
            pages_evicted=outcome.evicted,
            duration_s=outcome.duration_s,
            error=outcome.error,
        )
        self._log.transition(record)
        if outcome.result in ("started", "completed"):
            # The next tick may be seconds away, behind a long prefill.
            now = self._read()
            self._log.signals(now, self._backend.report, at_once=True)
        if self._metrics:
            self._metrics.transition(record)
        if outcome.result == "rolled_back":
            logger.error(
                "Morph %d -> %d was rolled back: %s", outcome.source, outcome.target, outcome.error
            )
        elif outcome.result != "deferred":
            logger.info(
                "Morph %d -> %d %s in %.1f ms (%s): %d pages lent, %d withdrawn, %d migrated, "
                "%d evicted",
                outcome.source,
                outcome.target,
                outcome.result,
                outcome.duration_s * 1e3,
                decision.reason,
                outcome.lent,
                outcome.withdrawn,
                outcome.migrated,
                outcome.evicted,
            )
