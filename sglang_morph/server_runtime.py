"""What the patches in the server process call."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, ClassVar

from patches.apply import check, install
from patches.registry import SCHEDULER_PATCHES, SERVER_PATCHES
from sglang_morph.controller.exposure import add_exposures
from sglang_morph.cpu import fill_cpu_defaults
from sglang_morph.observability.control import MorphControlReqOutput
from sglang_morph.options import MorphOptions
from sglang_morph.precision.demand import FIELD, min_precision
from sglang_morph.refusals import MorphRefusal

HTTP_SERVER = "sglang.srt.entrypoints.http_server"


class MorphServerRuntime:
    """Implements `patches.runtime.EntryPointRuntime`."""

    control_reply_type: ClassVar[type] = MorphControlReqOutput
    exposure_field: ClassVar[str] = FIELD

    def __init__(self, options: MorphOptions) -> None:
        self._options = options

    def fill_defaults(self, server_args: Any) -> None:
        fill_cpu_defaults(server_args)

    def before_start(self, server_args: Any) -> None:
        from sglang_morph.server_args import check_arguments

        try:
            check_arguments(server_args, self._options)
        except MorphRefusal as refusal:
            if HTTP_SERVER not in sys.modules:
                raise  # an Engine: its caller may want to handle it
            print(f"sglang_morph: {refusal}", file=sys.stderr, flush=True)
            raise SystemExit(2) from refusal
        # Imported by now if this process will serve HTTP; an Engine does without.
        if HTTP_SERVER in sys.modules:
            add_routes()
            read_demands()

    def metadata_of(self, meta_infos: list[dict[str, Any]]) -> dict[str, Any]:
        exposures = [info[FIELD] for info in meta_infos if FIELD in info]
        return {FIELD: add_exposures(exposures)} if exposures else {}

    def check_custom_params(self, custom_params: dict[str, Any]) -> None:
        min_precision(custom_params.get(FIELD))


@cache
def add_routes() -> None:
    """Add our routes to SGLang's application, once per process."""
    from sglang.srt.entrypoints import http_server

    from sglang_morph.observability.routes import router

    http_server.app.include_router(router)


@cache
def read_demands() -> None:
    """Have SGLang's application take the field `morph` of requests, once per process."""
    from sglang.srt.entrypoints import http_server
    from starlette.middleware import Middleware

    from sglang_morph.observability.demand_field import DemandField

    http_server.app.user_middleware.append(Middleware(DemandField))  # the last is the innermost


_installed = False


def prepare_server_process(options: MorphOptions) -> None:
    """Install the server's patches, once per process, and check the scheduler's beforehand.

    Installs nothing for `static`. Raises `PatchError`.
    """
    global _installed
    if options.is_static or _installed:
        return
    check(SCHEDULER_PATCHES)
    install(MorphServerRuntime(options), SERVER_PATCHES)
    _installed = True
