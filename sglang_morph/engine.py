"""`Engine`: SGLang's offline engine with an elastic memory backend.

    from sglang_morph.engine import Engine

    engine = Engine(model_path=..., memory_backend="layer_swap", morph_policy="manual")

Import this module before `sglang`: on a machine without a GPU it prepares the process first.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_morph.cpu import prepare_process

prepare_process()

from sglang.srt.entrypoints.engine import Engine as SglangEngine  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402

from sglang_morph.flags import ENVIRONMENT  # noqa: E402
from sglang_morph.observability.control import MorphControlReqOutput, send_control  # noqa: E402
from sglang_morph.scheduler_process import run_morph_scheduler_process  # noqa: E402
from sglang_morph.server_args import MorphServerArgs  # noqa: E402
from sglang_morph.server_runtime import prepare_server_process  # noqa: E402


class Engine(SglangEngine):
    """Takes the keyword arguments of `MorphServerArgs`. Raises `MorphRefusal` or `PatchError`."""

    server_args_class = MorphServerArgs
    run_scheduler_process_func = staticmethod(run_morph_scheduler_process)

    def __init__(self, *, log_level: str = "error", **kwargs: Any) -> None:
        # Its flags are for SGLang's own entry points; here the keyword arguments say it all.
        os.environ.pop(ENVIRONMENT, None)
        load_plugins()  # before the arguments are built: other plugins may hook them
        server_args = kwargs.pop("server_args", None)
        if server_args is None:
            server_args = self.server_args_class(log_level=log_level, **kwargs)
        prepare_server_process(server_args.morph)
        super().__init__(server_args=server_args)

    def morph(self, action: str, **argument: Any) -> MorphControlReqOutput:
        """Ask the runtime for `status`, `set_level` (with `level`), `verify` or another action of
        `MorphControlReq`.

        Raises RuntimeError with a static backend, which has no runtime.
        """
        if self.server_args.morph.is_static:
            raise RuntimeError("the memory backend is static; give memory_backend='layer_swap'")
        reply: MorphControlReqOutput = self.loop.run_until_complete(
            send_control(self.tokenizer_manager, action, argument)
        )
        return reply
