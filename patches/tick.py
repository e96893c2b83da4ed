"""Tick: a step boundary, in the normal and in the overlapping event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def before_next_batch(*_: Any, **__: Any) -> None:
        runtime.tick()

    return before_next_batch


PATCH = Patch(
    name="tick",
    target="sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
    kind="before",
    process="scheduler",
    why=(
        "Levels change between two steps: requests are received, nothing is planned yet, and "
        "admission and retraction follow in the same call."
    ),
    why_not_milder=(
        "A subclass of Scheduler cannot be injected. A thread would race with the radix cache "
        "and the allocator, which have no locks."
    ),
    upstream="none found",
    remove_when="The scheduler has a step callback.",
    source_sha256="e6a99a24e15c016772e55276f771578f1c8d9472133e5c8fe74a02220d7d2770",
    make_hook=make_hook,
)
