"""Bring SGLang's own copies of the KV capacity up to date after pages were lent or withdrawn.

SGLang copies `max_total_num_tokens` by value when it starts. Four objects compare or report
against the live number and are updated here. The scheduler's own copy, and with it the limits per
request, stays at base capacity but for long prompts (`request_lengths`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def publish_capacity(scheduler: Scheduler, pages: int) -> None:
    """Tell the statistics, the leak check, the load reports and the metrics that `pages` exist."""
    for holder in (
        scheduler.pool_stats_observer,
        scheduler.invariant_checker,
        scheduler.kv_events_publisher,
        scheduler.load_inquirer,
    ):
        if not hasattr(holder, "max_total_num_tokens"):
            raise AttributeError(f"{type(holder).__name__} holds no capacity any more")
        # Two of the four are frozen dataclasses.
        object.__setattr__(holder, "max_total_num_tokens", pages)
    reporter = scheduler.metrics_reporter
    if reporter.enable_metrics:
        collector = reporter.metrics_collector
        collector._log_gauge(collector.max_total_num_tokens, pages)


def bound_prefill_batches(scheduler: Scheduler, base_pages: int) -> None:
    """Without chunks nothing but the KV cache bounds a batch of prompts below `max_prefill_tokens`.

    SGLang makes its input buffers as long as the KV cache is at start; lent pages must not let a
    batch outgrow them.
    """
    if scheduler.chunked_prefill_size is None:
        scheduler.max_prefill_tokens = min(scheduler.max_prefill_tokens, base_pages)
