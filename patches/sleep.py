"""Sleep: an idle scheduler stays awake while weights come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def maybe_sleep_on_idle(original: Callable[..., None], scheduler: Any) -> None:
        if runtime.may_sleep():
            original(scheduler)

    return maybe_sleep_on_idle


PATCH = Patch(
    name="sleep",
    target="sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle",
    kind="around",
    process="scheduler",
    why=(
        "With --sleep-on-idle an idle step takes up to a second, and a restore goes on once a "
        "step: it would take seconds, when there is nothing else to do."
    ),
    why_not_milder="Refusing --sleep-on-idle would take a flag away that works otherwise.",
    upstream="none found",
    remove_when="A plugin can wake the idle scheduler, or keep it awake.",
    source_sha256="3c39e1fe8220ea3b941e4fd4c964a7d4799111d10d3f9ae80643c942bb0fc5ae",
    make_hook=make_hook,
)
