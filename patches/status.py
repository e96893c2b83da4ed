"""Status: `/server_info` shows the runtime's state beside SGLang's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def after_internal_state(reply: Any, *_: Any) -> None:
        reply.internal_state["morph"] = runtime.status()

    return after_internal_state


PATCH = Patch(
    name="status",
    target="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
    kind="after",
    process="scheduler",
    why="Tools that read /server_info see level and live capacity.",
    why_not_milder="The dictionary is built inside the method from fixed fields.",
    upstream="none found",
    remove_when="Plugins can contribute to the internal state.",
    source_sha256="91851662bc4609fd7a97e04df6b08b8d1f4c08f72820c38d5cb4b479e182e457",
    make_hook=make_hook,
)
