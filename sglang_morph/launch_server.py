"""`python -m sglang_morph.launch_server`: SGLang's server with an elastic memory backend.

Spawned processes import this module again, so nothing heavy happens at import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_morph.cpu import prepare_process
from sglang_morph.flags import ENVIRONMENT, options_from_text, to_argv
from sglang_morph.refusals import REFUSED, MorphRefusal

if TYPE_CHECKING:
    from sglang_morph.server_args import MorphServerArgs


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped. Returns the exit status."""
    try:
        # For SGLang's own entry points; here its flags come before those of the command line.
        inherited = to_argv(options_from_text(os.environ.pop(ENVIRONMENT, "")))
    except MorphRefusal as refusal:
        return _refuse(refusal)
    arguments = [*inherited, *(sys.argv[1:] if argv is None else argv)]
    prepare_process(arguments)

    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_process_tree

    from patches.apply import PatchError
    from sglang_morph.server_args import prepare_morph_server_args
    from sglang_morph.server_runtime import add_routes, prepare_server_process, read_demands
    from sglang_morph.start_errors import scheduler_refused

    load_plugins()
    try:
        server_args = prepare_morph_server_args(arguments)
        prepare_server_process(server_args.morph)
    except (MorphRefusal, PatchError) as error:
        return _refuse(error)
    add_routes()
    if not server_args.morph.is_static:
        read_demands()
    try:
        _serve(server_args)
    except RuntimeError as error:
        if not scheduler_refused(error):
            raise
        return REFUSED  # the scheduler has said why
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def _refuse(error: Exception) -> int:
    print(f"sglang_morph: {error}", file=sys.stderr)
    return REFUSED


def _serve(server_args: MorphServerArgs) -> None:
    if server_args.morph.is_static:
        from sglang.launch_server import run_server

        run_server(server_args)
    else:
        from sglang.srt.entrypoints.http_server import launch_server

        from sglang_morph.scheduler_process import run_morph_scheduler_process

        launch_server(server_args, run_scheduler_process_func=run_morph_scheduler_process)


if __name__ == "__main__":
    sys.exit(main())
