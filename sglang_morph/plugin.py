"""Entry point of SGLang's plugin framework: `sgl.Engine`, `sgl.Runtime` and `sglang serve`.

Does nothing unless the environment asks for an elastic backend. SGLang loads plugins in the server
and in the scheduler process, but which of the two a process will become is not known at that
moment (`sgl.Runtime` runs its server in a child as well). So both get all patches, and the
scheduler's runtime is created when a hook first needs it.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

from patches.apply import PatchError, install
from sglang_morph.flags import ENVIRONMENT, options_from_text
from sglang_morph.options import MorphOptions
from sglang_morph.refusals import REFUSED, MorphRefusal

if TYPE_CHECKING:
    from patches.runtime import SchedulerRuntime

logger = logging.getLogger(__name__)


def load() -> None:
    """Install all patches if `SGLANG_MORPH` names an elastic backend, else do nothing.

    SGLang logs an exception of a plugin and carries on without it. A server that then lacks what
    was asked for is worse than none, so a failure ends the process, with status 2.
    """
    text = os.environ.get(ENVIRONMENT, "").strip()
    if not text:
        return
    try:
        _install(text)
    except Exception as error:
        if not isinstance(error, (MorphRefusal, PatchError)):
            logger.exception("sglang_morph cannot start")
        print(f"sglang_morph: {error}", file=sys.stderr, flush=True)
        raise SystemExit(REFUSED) from error


def _install(text: str) -> None:
    options = options_from_text(text)
    if options.is_static:
        return
    from patches.registry import ENTRY_POINT_PATCHES, SCHEDULER_PATCHES, SERVER_PATCHES
    from sglang_morph.observability.control import MorphControlReq
    from sglang_morph.server_runtime import MorphServerRuntime

    install(MorphServerRuntime(options), ENTRY_POINT_PATCHES + SERVER_PATCHES)
    install(_RuntimeOnDemand(options, MorphControlReq), SCHEDULER_PATCHES)


class _RuntimeOnDemand:
    """A `SchedulerRuntime` that is created when the first hook calls it."""

    def __init__(self, options: MorphOptions, control_request_type: type) -> None:
        self._options = options
        self.control_request_type = control_request_type

    @cached_property
    def _runtime(self) -> SchedulerRuntime:
        from sglang_morph.runtime import create_runtime

        return create_runtime(self._options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)
