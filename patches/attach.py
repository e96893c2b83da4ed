"""Attach: the last step of the scheduler's initialisation that sees all its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def after_init(result: Any, scheduler: Any) -> None:
        runtime.attach(scheduler)

    return after_init


PATCH = Patch(
    name="attach",
    target="sglang.srt.managers.scheduler.Scheduler.init_batch_result_processor",
    kind="after",
    process="scheduler",
    why="The controller needs the scheduler's queue, caches, streams and capacity observers.",
    why_not_milder=(
        "run_scheduler_process builds the scheduler and enters its loop in one function; a "
        "subclass of Scheduler cannot be passed to it."
    ),
    upstream="none found",
    remove_when="The scheduler class is an argument of run_scheduler_process.",
    source_sha256="60fa2e1f95f26aee09fd60385f83d32c5aac21065129c49e2418166044b7e931",
    make_hook=make_hook,
)
