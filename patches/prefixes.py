"""Prefixes: a request between two chunks whose KV must not go into the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.ledger import Patch
from patches.runtime import SchedulerRuntime


def make_hook(runtime: SchedulerRuntime) -> Callable[..., Any]:
    def after_caching(
        result: Any, req: Any, tree_cache: Any, *, chunked: bool = False, **_: Any
    ) -> None:
        if chunked and req.skip_radix_cache_insert:
            runtime.chunk_left_out(req, tree_cache)

    return after_caching


PATCH = Patch(
    name="prefixes",
    target="sglang.srt.mem_cache.common.maybe_cache_unfinished_req",
    kind="after",
    process="scheduler",
    why="Where prefixes of different precision are kept apart, a mixed one must not be cached.",
    why_not_milder=(
        "SGLang's own skip_radix_cache_insert is what is used; it leaves out what the next chunk "
        "of a prompt needs, because prompts it is meant for have no chunks."
    ),
    upstream="none found",
    remove_when="skip_radix_cache_insert keeps the prefix of a chunked request up to date.",
    source_sha256="1711eac8200b700005ac2ffcce8271db81fcc1f826eb1867aae1867e8543ab25",
    make_hook=make_hook,
)
