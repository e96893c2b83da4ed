"""Reads what the controller needs from SGLang's scheduler. The only place that knows its fields."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from sglang_morph.controller.queue_tokens import waiting_tokens
from sglang_morph.controller.reclaim import PageTables, requests_with_kv
from sglang_morph.controller.signals import Signals

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_morph.controller.monitor import Monitor
    from sglang_morph.controller.request_counts import RequestCounts


def read_signals(
    scheduler: Scheduler,
    level: int,
    level_pages: tuple[int, ...],
    counts: RequestCounts,
    monitor: Monitor,
) -> Signals:
    """One reading, in constant time and without a device synchronisation."""
    allocator, queue = scheduler.token_to_kv_pool_allocator, scheduler.waiting_queue
    tokens = waiting_tokens(queue, lambda r: len(r.origin_input_ids) + len(r.output_ids))
    counts.waiting(tokens)
    now = time.perf_counter()
    oldest_wait = now - queue[0].time_stats.wait_queue_entry_time if queue else 0.0
    return Signals(
        now=now,
        base_pages=allocator.base_size,
        capacity_pages=allocator.size,
        free_pages=allocator.available_size(),
        evictable_pages=scheduler.tree_cache.evictable_size(),
        running=len(scheduler.running_batch.reqs),
        waiting=len(queue),
        oldest_wait_s=oldest_wait,
        admission_blocked=bool(queue) and scheduler.running_batch.batch_is_full,
        level=level,
        level_pages=level_pages,
        waiting_tokens=tokens,
        arrived_tokens_total=counts.arrived_tokens,
        served_tokens_total=counts.served_tokens,
        retractions_total=counts.retractions,
        ttft_s=monitor.ttft_s,
        tpot_s=monitor.tpot_s,
    )


def page_tables(scheduler: Scheduler) -> PageTables:
    """All holders of page ids, between two scheduler steps, in both event loops.

    A prefill that is not merged yet is only in `last_batch`, a request between two chunks only in
    `chunked_req`. Waiting requests match their prefix again before they use it.
    """
    last, chunked = scheduler.last_batch, scheduler.chunked_req
    return PageTables(
        allocator=scheduler.token_to_kv_pool_allocator,
        pool=scheduler.token_to_kv_pool_allocator.get_kvcache(),
        tree_cache=scheduler.tree_cache,
        req_to_token_pool=scheduler.req_to_token_pool,
        requests=requests_with_kv(
            (
                scheduler.running_batch.reqs,
                last.reqs if last is not None else (),
                (chunked,) if chunked is not None else (),
            )
        ),
        chunked=chunked,
    )


def growth_reserve(scheduler: Scheduler) -> int:
    """Pages the admitted requests will still take, as SGLang's admission estimates it, plus one
    decode step, so that a reclaim does not cause a retraction at once."""
    last, chunked = scheduler.last_batch, scheduler.chunked_req
    admitted = {id(r): r for r in scheduler.running_batch.reqs}
    if last is not None:
        admitted.update((id(r), r) for r in last.reqs if not r.finished())
    growth = sum(
        min(r.sampling_params.max_new_tokens - len(r.output_ids), CLIP_MAX_NEW_TOKENS)
        for r in admitted.values()
    )
    unread = 0
    if chunked is not None:
        prompt = len(chunked.origin_input_ids) + len(chunked.output_ids)
        unread = prompt - len(chunked.prefix_indices)
    return int(growth * scheduler.new_token_ratio_tracker.current) + len(admitted) + unread
