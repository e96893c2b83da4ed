"""Requests: arrivals, retractions and latencies, for the controller's signals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_queued_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def after_queued(result: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
        runtime.request_queued(req, is_retracted)

    return after_queued


def make_released_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def after_release(result: Any, req: Any, *_: Any, **__: Any) -> None:
        runtime.request_released(req)

    return after_release


QUEUED = Patch(
    name="request_queued",
    target="sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
    kind="after",
    process="scheduler",
    why="Tokens that arrive faster than they are served are the earliest sign of a burst.",
    why_not_milder="SGLang counts requests, not their tokens, and only where metrics are enabled.",
    upstream="none found",
    remove_when="The scheduler keeps a counter of prompt tokens received.",
    source_sha256="075bf4dbc714af28dd4bdd6883ffb8ed8a0bf7a27f7fb84f3f02a73163a34c1f",
    make_hook=make_queued_hook,
)

RELEASED = Patch(
    name="request_released",
    target="sglang.srt.mem_cache.common.release_kv_cache",
    kind="after",
    process="scheduler",
    why="Policies that aim at latency need TTFT and TPOT in the scheduler process.",
    why_not_milder="SGLang observes latencies in the tokenizer process, behind a metrics switch.",
    upstream="none found",
    remove_when="The scheduler reports finished requests to plugins.",
    source_sha256="0fb7e224c74412125ffd786c6851f0e2bf097268a976aafdbf9265b3a6f25656",
    make_hook=make_released_hook,
)

PATCHES = (QUEUED, RELEASED)
