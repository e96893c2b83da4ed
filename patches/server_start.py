"""Server start under SGLang's own entry points: the arguments are final, nothing runs yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import EntryPointRuntime


def make_hook(runtime: EntryPointRuntime) -> Callable[..., Any]:
    def after_checks(result: Any, server_args: Any) -> None:
        runtime.before_start(server_args)

    return after_checks


PATCH = Patch(
    name="server_start",
    # Not __post_init__: sgl.Runtime builds its arguments in a process that loads no plugins.
    target="sglang.srt.server_args.ServerArgs.check_server_args",
    kind="after",
    process="server",
    why=(
        "Combinations that an elastic backend cannot serve are named before weights are loaded, "
        "and the HTTP server gets the /morph routes."
    ),
    why_not_milder=(
        "Stock entry points build stock ServerArgs; a subclass cannot be injected. Whether this "
        "process will serve HTTP is not known when plugins load."
    ),
    upstream="none found",
    remove_when="Plugins can veto arguments and add routers.",
    source_sha256="5820f07b7e7ab21bc9b71171fb1c3625b90b1da701e5d13bcfa7f7d6863a413a",
    make_hook=make_hook,
)
