"""Launch: a forward starts, at the precision level of this moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def before_run(scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        runtime.launched(batch)

    return before_run


PATCH = Patch(
    name="launch",
    target="sglang.srt.managers.scheduler.Scheduler.run_batch",
    kind="before",
    process="scheduler",
    why="Every answer says at which level its tokens were computed; a forward is where that is so.",
    why_not_milder=(
        "The tick does not know which batch will run, and the result of a forward is processed "
        "when the level may have changed already."
    ),
    upstream="none found",
    remove_when="The scheduler has a callback for every forward it launches.",
    source_sha256="af728442e936b53c6ffbc17d47d6e8d8686f0c2a4f80777bfc29f305ce9f7eda",
    make_hook=make_hook,
)
