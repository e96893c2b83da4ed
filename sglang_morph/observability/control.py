"""Control messages between server and scheduler process, sent as SGLang sends its own."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types


class MorphControlReq(BaseReq):
    """Ask the runtime for an action: `status`, `verify`, or with an argument as in
    `sglang_morph.controller.changes`: `events`, `set_level`, `set_policy`, `set_limits`."""

    action: str
    argument: dict[str, Any] = {}


class MorphControlReqOutput(BaseReq):
    """The runtime's answer. Without `success`, `message` says why, and nothing has changed."""

    success: bool
    message: str = ""
    payload: dict[str, Any] = {}


# SGLang's msgpack transport (SGLANG_USE_PICKLE_IPC=0) decodes only types that it was told of.
hook_custom_types(MorphControlReq, MorphControlReqOutput)


async def send_control(
    tokenizer_manager: Any, action: str, argument: dict[str, Any] | None = None
) -> MorphControlReqOutput:
    """Send a request to the scheduler and await its answer. Needs the `communicator` patch."""
    tokenizer_manager.auto_create_handle_loop()
    request = MorphControlReq(action=action, argument=argument or {})
    replies: list[MorphControlReqOutput] = await tokenizer_manager.morph_communicator(request)
    return replies[0]
