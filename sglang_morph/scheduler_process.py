"""The scheduler process: patches first, then SGLang's own function."""

from __future__ import annotations

from typing import Any

from patches.apply import install
from patches.registry import SCHEDULER_PATCHES
from sglang_morph.options import MorphOptions


def run_morph_scheduler_process(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's `run_scheduler_process` for `MorphServerArgs`. Pickled by name into the process."""
    # Imported here: loading this module must not need SGLang's scheduler in the launcher.
    from sglang.srt.managers.scheduler import run_scheduler_process

    if not server_args.morph.is_static:
        prepare_scheduler_process(server_args.morph)
    run_scheduler_process(server_args, *args, **kwargs)


def prepare_scheduler_process(options: MorphOptions) -> None:
    """Install the scheduler's patches; end the process if one does not work."""
    from sglang_morph.runtime import create_runtime
    from sglang_morph.start_errors import ending_in_one_line

    with ending_in_one_line():
        install(create_runtime(options), SCHEDULER_PATCHES)
