"""Argument defaults under SGLang's own entry points (`MorphServerArgs` does it by inheritance)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import EntryPointRuntime


def make_hook(runtime: EntryPointRuntime) -> Callable[..., Any]:
    def before_resolution(server_args: Any) -> None:
        runtime.fill_defaults(server_args)

    return before_resolution


PATCH = Patch(
    name="argument_defaults",
    target="sglang.srt.server_args.ServerArgs.__post_init__",
    kind="before",
    process="server",
    why="On a CPU the stock defaults choose kernels and a KV size that a small machine lacks.",
    why_not_milder=(
        "Platform.apply_server_args_defaults exists for out-of-tree platforms only; an "
        "environment variable per default does not exist."
    ),
    upstream="none found",
    remove_when="Plugins can supply argument defaults.",
    source_sha256="86ec2bccf31de2f156c491e088aa1ab7a070b75dbdada5f625c7cd896b92db09",
    make_hook=make_hook,
)
