"""Control, scheduler side: requests to the runtime arrive as SGLang's own control messages do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def after_init(result: Any, scheduler: Any) -> None:
        from sglang.utils import TypeBasedDispatcher

        scheduler._request_dispatcher += TypeBasedDispatcher(
            [(runtime.control_request_type, runtime.handle_control)]
        )

    return after_init


PATCH = Patch(
    name="control",
    target="sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher",
    kind="after",
    process="scheduler",
    why="The level can be set, and weights verified, while the server runs.",
    why_not_milder=(
        "set_internal_state takes a fixed list of settings; handle_rpc_request returns no value "
        "and is reachable from Engine only."
    ),
    upstream="none found",
    remove_when="Plugins can register control messages.",
    source_sha256="2586ba70430af95e9c01ac2dbd711f0bb0c235a21e5a7dc43288f322444767c8",
    make_hook=make_hook,
)
