"""Communicator, server side: sends control requests to every scheduler and gathers the replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import ServerRuntime


def make_hook(runtime: ServerRuntime) -> Callable[..., Any]:
    def after_init(result: Any, manager: Any, server_args: Any) -> None:
        from sglang.srt.managers.communicator import FanOutCommunicator
        from sglang.utils import TypeBasedDispatcher

        communicator: FanOutCommunicator[Any] = FanOutCommunicator(
            manager._dispatch_to_scheduler, server_args.dp_size
        )
        manager.morph_communicator = communicator
        manager._result_dispatcher += TypeBasedDispatcher(
            [(runtime.control_reply_type, communicator.handle_recv)]
        )

    return after_init


PATCH = Patch(
    name="communicator",
    target=("sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators"),
    kind="after",
    process="server",
    why="HTTP routes and Engine reach the runtime in the scheduler process.",
    why_not_milder=(
        "The list of communicators is a private module constant; changing it would change every "
        "engine of the process, static ones too. A subclass of TokenizerManager can be injected, "
        "but not under stock entry points, and would take the user's own place."
    ),
    upstream="none found",
    remove_when="Plugins can register control messages.",
    source_sha256="54b217a0206797a57d687f1688792543e8009c34f0cdaa62617044f163b64242",
    make_hook=make_hook,
)
