"""Running totals of requests, told by hooks: what a reading of the scheduler does not show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_morph.controller.eviction_cost import PrefixReuse
from sglang_morph.controller.monitor import Monitor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class RequestCounts:
    """Tokens of prompts that arrived, requests put back, and latencies of those that finished."""

    def __init__(self, monitor: Monitor, reuse: PrefixReuse) -> None:
        self.arrived_tokens = 0
        self.served_tokens = 0
        """Prompt tokens of requests that left the queue; never falls."""
        self.retractions = 0
        self._monitor = monitor
        self._reuse = reuse

    def queued(self, req: Req, is_retracted: bool) -> None:
        """`req` was put into the waiting queue, for the first time or again."""
        if is_retracted:
            self.retractions += 1
        else:
            self.arrived_tokens += len(req.origin_input_ids)

    def waiting(self, tokens: int) -> None:
        """`tokens` of prompts wait now."""
        self.served_tokens = max(self.served_tokens, self.arrived_tokens - tokens)

    def released(self, req: Req, now: float) -> None:
        """`req` gave its KV back; counted if it ran to its end. Seconds of `perf_counter`."""
        stats = req.time_stats
        if not req.finished() or isinstance(req.finished_reason, FINISH_ABORT):
            return
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        self._reuse.finished(req.cached_tokens, tokens - req.cached_tokens)
        if not stats.prefill_finished_time or not stats.scheduler_recv_time:
            return
        decoded = len(req.output_ids) - 1
        tpot = (now - stats.prefill_finished_time) / decoded if decoded > 0 else None
        self._monitor.request_finished(
            stats.prefill_finished_time - stats.scheduler_recv_time, tpot
        )
